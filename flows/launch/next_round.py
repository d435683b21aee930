"""Begin the next round: people's votes on a policy refresh the reward model, which then trains the next policy."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from components.base.errors import UserError
from components.human_eval.batch.halves import HELD_OUT
from components.store.store import ArtifactStore
from flows.config.profiles import Override, apply_overrides
from flows.config.removed import without_removed
from flows.config.run_config import check_config, check_kl_limits
from flows.launch.begin import Launch, new_run
from flows.launch.request import DEFAULTS, Request
from tasks.runs.config import run_values
from tasks.runs.status import RunStatus, load_readable, load_status

AGREEMENT = "human_eval.reward_agreement_low"
"""The gate on how often people and the reward model agree on the policy's own responses."""
REPLAY = 0.75
"""Default share of earlier pairs in the training data of a round. With a quarter, the few votes were memorised and the
earlier pairs forgotten (docs/benchmarks.md)."""
SCORED = ("passed", "cached", "waived", "gate_failed")
"""States of `human_eval` in which people's votes have been scored."""


def next_round(
    home: Path,
    run: str | None = None,
    overrides: Sequence[Override] = (),
    request: Request = DEFAULTS,
) -> Launch:
    """Begin the round after `run`: with its config, the votes on its policy, its reward model to refresh and its SFT
    model.

    The votes are read from the scored artifact in the store, so the lineage goes from batch to preferences, reward
    model and policy. PPO starts from SFT again (docs/decisions.md). If the call is repeated, its keys are the same:
    finished results are found, and interrupted ones continue.

    Args:
        run: the run whose policy people judged; None takes the newest such run.
        overrides: changes to that run's config.

    Raises:
        UserError: there is no such run, or people have not judged its policy.
    """
    status = judged_run(home, run)
    values = without_removed(run_values(home, status.run), f"run {status.run}")
    before = check_config(values, source=f"run {status.run}")
    reward: dict[str, JsonValue] = {"from_run": status.run, "replay": REPLAY}
    if before.reward.refresh is not None:
        reward = before.reward.refresh.model_dump() | {"from_run": status.run}
    changes = [
        Override(("data", "votes"), [*before.data.votes, status.run]),
        Override(("sft", "keep"), before.sft.keep or status.run),
        Override(("reward", "refresh"), reward),
    ]
    if misfits := before.runtime.misfits():
        values = {**values, "runtime": {}}
    config = check_config(apply_overrides(values, [*changes, *overrides]), source=f"run {status.run}")
    check_kl_limits(config, f"run {status.run}", before)
    launch = new_run(home, status.profile, config, request, like=status.run)
    notes = [f"round {len(config.data.votes)}, from the votes on the policy of run {status.run}"]
    if misfits:
        notes.append(f"run {status.run} was resolved for another machine ({'; '.join(misfits)})")
    notes += held(status)
    return launch._replace(notes=[*notes, *launch.notes])


def judged_run(home: Path, run: str | None) -> RunStatus:
    """Return the run `run`, or the newest run whose policy people have judged.

    Raises:
        UserError: there is no such run, or people have not judged its policy.
    """
    if run is None:
        run = next((newest.run for newest in load_readable(home)[0] if _votes(home, newest)), None)
    status = load_status(home, run)
    if not _votes(home, status):
        state = status.stage("human_eval").state
        raise UserError(
            f"iterate {status.run}: people have not judged its policy (human_eval: {state}). If it waits for labels, "
            f"score the filled sheets (`tether people score SHEETS --run {status.run}`); otherwise continue it "
            f"(`tether status {status.run}` shows where it ended), or name another run."
        )
    return status


def _votes(home: Path, status: RunStatus) -> bool:
    stage = status.stage("human_eval")
    if stage.state not in SCORED or stage.digest is None:
        return False
    return (ArtifactStore(home).path(stage.digest) / HELD_OUT).is_file()


def held(status: RunStatus) -> list[str]:
    """Return a sentence if a run's policy is held because its reward model disagrees with people; otherwise nothing."""
    gate = next((gate for gate in status.stage("human_eval").gates if gate.name == AGREEMENT), None)
    if gate is None or not gate.stops:
        return []
    return [
        f"{AGREEMENT} failed in run {status.run}: its reward model disagrees with people ({gate.text}), so its policy "
        f"is held and is not promoted. This round trains the reward model on their votes"
    ]
