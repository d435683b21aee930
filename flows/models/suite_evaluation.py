"""`tether eval`: evaluate any reward model on a suite of pairs that others have judged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import CheckFailed, UserError
from components.base.hashing import digest_file
from components.base.paths import user_path
from components.base.text import counted
from components.gates.gate_text import number
from components.models.runtime import Runtime, activate
from components.store.graph import Graph
from components.store.store import ArtifactStore
from flows.data.hub_models import hub_model, is_hub_name
from flows.models.model_facts import find_model
from tasks.runs.status import has_run
from tasks.tracking.registry import find_version

REWARD = "reward"


class RewardModel(NamedTuple):
    """A reward model that the user named."""

    name: str
    """The name that the user gave; for a hub model with its commit."""
    folder: Path
    digest: str = ""
    """The artifact's digest; empty for a folder or a hub model."""


def find_reward_model(home: Path, asked: str) -> RewardModel:
    """Return the reward model that `asked` names: a run's (RUN:reward, RUN), a registered one, a folder or a hub model.

    Raises:
        UserError: there is no such model, or it is not a reward model.
    """
    run, _, stage = asked.replace("/", ":").partition(":")
    if has_run(home, run):
        return _stored(home, asked, f"{run}/{stage or REWARD}")
    path = user_path(asked, "eval")
    if path.is_dir():
        return RewardModel(asked, path)
    if find_version(home, asked):
        return _stored(home, asked, asked)
    if is_hub_name(asked) and not path.exists():
        name, folder = hub_model(asked, home, "eval")
        return RewardModel(name, folder)
    raise UserError(
        f"eval {asked}: there is no such reward model. Name a run's (RUN:{REWARD}), a registered one "
        f"(tether-reward@candidate), the folder of one, or a sequence classifier of the hub (org/name@revision)."
    )


def _stored(home: Path, asked: str, spelled: str) -> RewardModel:
    store = ArtifactStore(home)
    digest, _ = find_model(home, spelled, Graph.of(store))
    folder = store.path(digest)
    if not (folder / "reward.json").is_file():
        raise UserError(f"eval {asked}: not a reward model, or the store has lost it. Name one as RUN:{REWARD}.")
    return RewardModel(asked, folder, digest)


def evaluate(home: Path, asked: str, file: Path) -> dict[str, Any]:
    """Score a suite with a reward model and return what `tether eval --json` prints.

    Raises:
        UserError: there is no such model, or the suite can't be read.
    """
    from components.reward.suites.suite_formats import read_suite  # the imports below load torch and scipy

    suite = read_suite(user_path(str(file), "--suite"))
    model = find_reward_model(home, asked)
    from components.reward.suites.evaluation import on_suite
    from components.reward.suites.scorer import RewardScorer

    runtime = Runtime().resolve()
    activate(runtime)
    scorer = RewardScorer.load(model.folder, runtime, f"eval {asked}")
    try:
        found = on_suite(scorer, suite)
    except CheckFailed as error:
        raise UserError(f"eval {asked}: {error} Use an undamaged model.") from error
    return {
        "model": model.name,
        "digest": model.digest or None,
        "suite": file.name,
        "suite_sha256": digest_file(file),
        "temperature": scorer.temperature,
        "temperature_fitted": scorer.ours,
        **found,
    }


def text(found: Mapping[str, Any]) -> str:
    """Return the result of `evaluate` as a Markdown table."""
    overall = found["overall"]
    fitted = "fitted by its run" if found["temperature_fitted"] else "not fitted: differences are used as log-odds"
    about = [f"{counted(overall['pairs'], 'pair')}, {counted(overall['prompts'], 'prompt')}"]
    if found["ties_left_out"]:
        about.append(f"{counted(found['ties_left_out'], 'tie')} left out")
    if found["cut"]:
        about.append(f"{counted(found['cut'], 'pair')} truncated to the model's length")
    lines = [
        f"{found['model']} on {found['suite']} ({found['shape']}): {', '.join(about)}.",
        f"Temperature {number(found['temperature'])} ({fitted}). Intervals: 95 %, clustered by prompt.",
        "",
        "| subset | pairs | accuracy | log loss | Brier | ECE (95 % quantile if calibrated) | slope | "
        "tokens: chosen, rejected | longer wins | balanced by length |",
        "|---|---:|---|---|---|---|---|---|---:|---|",
        *(_row(name, each) for name, each in {"all": overall, **found["subsets"]}.items()),
    ]
    if len(found["subsets"]) > 1:
        lines += ["", f"Mean accuracy of the subsets: {found['mean_of_subsets']:.3f}."]
    return "\n".join(lines)


def _row(name: str, of: Mapping[str, Any]) -> str:
    ece = f"{number(of['ece'])} ({number(of['ece_null_95'])})" if "ece" in of else "few pairs"
    slope = "few pairs" if "ece" not in of else number(of["calibration_slope"])
    cells = [
        name, of["pairs"], *(_ranged(of, metric) for metric in ("accuracy", "log_loss", "brier")), ece, slope,
        f"{of['chosen_tokens']:.1f}, {of['rejected_tokens']:.1f}", f"{of['length_accuracy']:.3f}",
        _ranged(of, "balanced_length_accuracy"),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _ranged(of: Mapping[str, Any], name: str) -> str:
    if of[name] is None:
        return "none"
    ends = f" ({of[f'{name}_low']:.3f} to {of[f'{name}_high']:.3f})" if of[f"{name}_low"] is not None else ""
    return f"{of[name]:.3f}{ends}"
