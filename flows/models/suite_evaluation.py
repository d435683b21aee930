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
from flows.data.candidates import model_kind
from flows.data.hub_models import hub_model, is_hub_name
from flows.models.model_facts import find_model
from tasks.runs.status import has_run
from tasks.tracking.registry import find_version

REWARD = "reward"
OTHER_KIND = "A language model is evaluated with --tasks or --probes."


class RewardModel(NamedTuple):
    """A reward model that the user named."""

    name: str
    """The name that the user gave; for a hub model with its commit."""
    folder: Path
    digest: str = ""
    """The artifact's digest; empty for a folder or a hub model."""


def find_reward_model(home: Path, model_name: str) -> RewardModel:
    """Return the reward model of a run (RUN:reward, RUN), a registered one, one in a folder, or a hub model.

    Raises:
        UserError: there is no such model, or it is not a reward model.
    """
    run, _, stage = model_name.replace("/", ":").partition(":")
    if has_run(home, run):
        return _stored(home, model_name, f"{run}/{stage or REWARD}")
    path = user_path(model_name, "eval")
    if path.is_dir():
        kinds = [] if (path / "reward.json").is_file() else model_kind(path, f"eval {model_name}")[1]
        if kinds and not any(kind.endswith("Classification") for kind in kinds):
            raise UserError(f"eval {model_name}: it is a {kinds[0]}, which has no score. {OTHER_KIND}")
        return RewardModel(model_name, path)
    if find_version(home, model_name):
        return _stored(home, model_name, model_name)
    if is_hub_name(model_name) and not path.exists():
        name, folder = hub_model(model_name, home, "eval")
        return RewardModel(name, folder)
    raise UserError(
        f"eval {model_name}: there is no such reward model. Name a run's (RUN:{REWARD}), a registered one "
        f"(tether-reward@candidate), the folder of one, or a sequence classifier of the hub (org/name@revision)."
    )


def _stored(home: Path, name: str, spelled: str) -> RewardModel:
    store = ArtifactStore(home)
    digest, _ = find_model(home, spelled, Graph.of(store))
    folder = store.path(digest)
    if not (folder / "reward.json").is_file():
        raise UserError(
            f"eval {name}: not a reward model, or the store has lost it. Name one as RUN:{REWARD}. {OTHER_KIND}"
        )
    return RewardModel(name, folder, digest)


def evaluate(home: Path, name: str, file: Path) -> dict[str, Any]:
    """Score a suite with a reward model and return what `tether eval --json` prints.

    Raises:
        UserError: there is no such model, or the suite can't be read.
    """
    from components.reward.suites.suite_formats import read_suite  # the imports below load torch and scipy

    suite = read_suite(user_path(str(file), "--suite"))
    model = find_reward_model(home, name)
    from components.reward.suites.evaluation import on_suite
    from components.reward.suites.scorer import RewardScorer

    runtime = Runtime().resolve()
    activate(runtime)
    scorer = RewardScorer.load(model.folder, runtime, f"eval {name}")
    try:
        scores = on_suite(scorer, suite)
    except CheckFailed as error:
        raise UserError(f"eval {name}: {error} Use an undamaged model.") from error
    return {
        "model": model.name,
        "digest": model.digest or None,
        "suite": file.name,
        "suite_sha256": digest_file(file),
        "temperature": scorer.temperature,
        "temperature_fitted": scorer.ours,
        **scores,
    }


def text(result: Mapping[str, Any]) -> str:
    """Return the result of `evaluate` as a Markdown table."""
    overall = result["overall"]
    fitted = "fitted by its run" if result["temperature_fitted"] else "not fitted: differences are used as log-odds"
    about = [f"{counted(overall['pairs'], 'pair')}, {counted(overall['prompts'], 'prompt')}"]
    if result["ties_left_out"]:
        about.append(f"{counted(result['ties_left_out'], 'tie')} left out")
    if result["cut"]:
        about.append(f"{counted(result['cut'], 'pair')} truncated to the model's length")
    lines = [
        f"{result['model']} on {result['suite']} ({result['shape']}): {', '.join(about)}.",
        f"Temperature {number(result['temperature'])} ({fitted}). Intervals: 95 %, clustered by prompt.",
        "",
        "| subset | pairs | accuracy | log loss | Brier | ECE (95 % quantile if calibrated) | slope | "
        "tokens: chosen, rejected | longer wins | balanced by length |",
        "|---|---:|---|---|---|---|---|---|---:|---|",
        *(_row(name, scores) for name, scores in {"all": overall, **result["subsets"]}.items()),
    ]
    if len(result["subsets"]) > 1:
        lines += ["", f"Mean accuracy of the subsets: {result['mean_of_subsets']:.3f}."]
    return "\n".join(lines)


def _row(name: str, scores: Mapping[str, Any]) -> str:
    ece = f"{number(scores['ece'])} ({number(scores['ece_null_95'])})" if "ece" in scores else "few pairs"
    slope = "few pairs" if "ece" not in scores else number(scores["calibration_slope"])
    cells = [
        name, scores["pairs"], *(_ranged(scores, metric) for metric in ("accuracy", "log_loss", "brier")), ece, slope,
        f"{scores['chosen_tokens']:.1f}, {scores['rejected_tokens']:.1f}", f"{scores['length_accuracy']:.3f}",
        _ranged(scores, "balanced_length_accuracy"),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _ranged(scores: Mapping[str, Any], name: str) -> str:
    if scores[name] is None:
        return "none"
    low, high = scores[f"{name}_low"], scores[f"{name}_high"]
    return f"{scores[name]:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None else "")
