"""Compare the rounds of `tether iterate`: do reward model and policy improve from people's votes?"""

from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from tasks.runs.status import RunStatus, load_status


class Round(NamedTuple):
    """A run as a round. Round 0 is the run whose policy people judged first."""

    run: str
    round: int
    votes_from: str
    """The run whose policy was judged last before this round; empty for round 0."""
    state: str
    judged_before: float | None
    """Share of all pairs judged so far, on prompts that are never trained on, for which the previous round's reward
    model agrees with most raters; None for round 0."""
    judged: float | None
    """The same share for this round's reward model."""
    agreement: float | None
    """Agreement of the reward model with the judges of this round's own batch."""
    win_rate: float | None
    """Win rate of the policy against SFT, from the judges of its own batch."""
    gold: float | None
    """The true score, if known."""
    kl: float | None
    """KL to SFT, nats a response."""

    @classmethod
    def of(cls, status: RunStatus) -> "Round":
        """Return a run as a round, with the metrics of its stages."""
        metrics = {name: value for stage in status.stages for name, value in stage.metrics.items()}
        named = (
            "reward/judged_previous", "reward/judged", "human_eval/reward_agreement", "human_eval/win_rate",
            "policy/gold", "policy/kl",
        )  # fmt: skip
        place = int(status.origin.get("round", 0))
        parent = status.origin.get("votes", "")
        return cls(status.run, place, parent, status.state, *(metrics.get(name) for name in named))


def rounds_up_to(home: Path, status: RunStatus) -> list[Round]:
    """Return the rounds that led to a run, and the run itself, oldest first; empty if the run is not a later round."""
    found = [status]
    while (parent := found[-1].origin.get("votes")) and parent not in {each.run for each in found}:
        try:
            found.append(load_status(home, parent))
        except UserError:  # removed or damaged: show the rounds that are known
            break
    return [Round.of(each) for each in reversed(found)] if status.origin.get("votes") else []


COLUMNS = {
    "judged_before": "judged before", "judged": "judged", "agreement": "own batch", "win_rate": "win rate",
    "gold": "gold", "kl": "KL",
}  # fmt: skip
"""Maps a field of a round to the heading of its column."""
