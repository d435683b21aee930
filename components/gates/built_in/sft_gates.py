"""Gates of supervised fine-tuning."""

from components.gates.gate import Gate
from components.gates.remedies import LONGER_RESPONSES, OptionChange, times

SFT_GATES = (
    Gate(
        "sft.loss", "<=", "held-out loss, nats per response token, upper end", "sft/loss_high",
        cause="The model has not learned the demonstrations: too few steps, a wrong learning rate, or texts that "
        "differ between the splits.",
        remedy="Raise `sft.epochs`, or set `sft.learning_rate` (null chooses one by the model's size). Look at the "
        "curve of `sft/train_loss`: a loss that rises while it trains needs a lower rate.",
        changes=(OptionChange("sft.epochs", times(2)),),
    ),
    Gate(
        "sft.perplexity_ratio", "<=",
        "held-out perplexity against the baseline's, upper end", "sft/perplexity_ratio_high",
        cause="The model predicts held-out demonstrations hardly better than its baseline (the base model, or word "
        "frequencies for a model from scratch).",
        remedy="Raise `sft.epochs` or `sft.max_demonstrations`, or start from a larger `sft.base`.",
        changes=(OptionChange("sft.epochs", times(2)),),
    ),
    Gate(
        "sft.ended", ">=", "share of responses that end by themselves, lower end", "sft/ended_low",
        cause="Responses run into the cap: the demonstrations are longer than the cap, or the model did not learn to "
        "end.",
        remedy="Raise `generation.max_new_tokens`. Keep `sft.overlong=drop`: a demonstration that is cut teaches the "
        "model not to end. Raise `sft.epochs` if few responses end at any length.",
        changes=(OptionChange("sft.overlong", "drop"), LONGER_RESPONSES),
    ),
)  # fmt: skip
