"""How responses are sampled, the same in every stage: a policy is judged under the distribution it was trained in."""

from pydantic import Field

from components.settings import Settings


class GenerationConfig(Settings):
    """Sampling of responses: no top-k, top-p or repetition penalty, so log-probabilities are of what was sampled."""

    max_prompt_tokens: int = Field(256, ge=1)
    """Longest prompt in tokens, chat template included; a longer one loses its oldest turns, then its oldest tokens."""
    max_new_tokens: int = Field(64, ge=1)
    """Cap on a response's length in tokens, EOS included."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of sampling; log-probabilities are taken at it."""
