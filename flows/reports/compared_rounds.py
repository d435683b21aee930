"""Find the rounds of `tether iterate` that led to a run: do reward model and policy improve from people's votes?"""

from pathlib import Path

from components.base.errors import UserError
from tasks.runs.status import RunStatus, load_status

COLUMNS = {
    "judged before": "reward/judged_previous", "judged": "reward/judged", "own batch": "human_eval/reward_agreement",
    "win rate": "human_eval/win_rate", "gold": "policy/gold", "KL": "policy/kl",
}  # fmt: skip
"""Maps the heading of a column to its metric. Both `judged` are shares of all pairs judged so far, on prompts that are
never trained on, for which a reward model agrees with most raters: first the previous round's, then this round's."""


def rounds_up_to(home: Path, status: RunStatus) -> list[RunStatus]:
    """Return the rounds that led to a run, and the run itself, oldest first; empty if the run is not a later round.

    Round 0 is the run whose policy people judged first.
    """
    rounds = [status]
    while (parent := rounds[0].origin.get("votes")) and parent not in {earlier.run for earlier in rounds}:
        try:
            rounds.insert(0, load_status(home, parent))
        except UserError:  # removed or damaged: show the rounds that are known
            break
    return rounds if status.origin.get("votes") else []
