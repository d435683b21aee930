"""Begin or continue runs that need people's labels: a comparison of models, and scoring a run's labels."""

from collections.abc import Sequence
from pathlib import Path

from components.base.errors import UserError
from components.gates.judging import GatesConfig
from components.store.store import ArtifactStore
from flows.base_run import changed_before, choose_base, standing
from flows.config.profiles import Override, apply_overrides
from flows.config.removed import without_removed
from flows.config.run_config import check_config
from flows.launch.begin import Launch, begin_run, execution_of, off_gates
from flows.launch.reports import write_reports
from flows.launch.request import DEFAULTS, Request
from flows.people.rater_sheets import joined
from flows.sources import compared_sources, find_sources
from tasks.execution.context import Reporting, Reuse, RunContext
from tasks.result import Input
from tasks.runs.config import run_values
from tasks.runs.status import load_status
from tasks.stages import PIPELINE
from tasks.tracking.mlflow_client import check_access

OF_RATERS = ("labels_complete", "items", "fleiss_kappa", "position_bias", "self_agreement_low", "raters_alike")
"""The gates of human_eval that apply to a comparison: those on the raters. A comparison promotes no model."""


def compare(
    home: Path,
    models: Sequence[str],
    run: str | None = None,
    overrides: Sequence[Override] = (),
    request: Request = DEFAULTS,
) -> Launch:
    """Begin a run that compares two or more models on held-out prompts of an earlier run. The first is the baseline.

    Args:
        models: as `find_compared` takes them.
        run: the run whose prompts and config are used; None takes the newest one whose data are in the store.
        overrides: changes to that config.

    Raises:
        UserError: there are no such models or run, or `overrides` change how that run's data were made.
    """
    from flows.models.compared_models import as_origin, find_compared
    from tasks.runs.comparison_names import COMPARED

    named_models = find_compared(home, models)
    base = choose_base(home, "sft", run)
    values = {**base.values, "runtime": {}} if base.config.runtime.misfits() else base.values
    config = check_config(apply_overrides(values, overrides), source=f"run {base.run}")
    for field in changed_before("sft", base.config, config):
        raise UserError(f"--set {field}: the prompts come from run {base.run}, which did not use it. Leave it out.")
    named = config.gates.model_dump().get("human_eval", {})
    gates = GatesConfig.model_validate({"human_eval": {name: named[name] for name in OF_RATERS if name in named}})
    policy = config.policy.model_copy(update={"stop_on_alarm": False})  # its limit is one of the gates left out
    config = config.model_copy(update={"gates": gates, "policy": policy}).resolved(with_ppo=False)
    data, store = base.records["validate"], ArtifactStore(home)
    compared = {"data": Input(digest=data.digest, path=store.path(data), stage="validate", stored=True), **named_models}
    sources = compared_sources(config, home, compared)
    origin = {"stage": "human_eval", "from": base.run, COMPARED: as_origin(models, compared)}
    ctx = begin_run(home, base.profile, config, origin, request, base.run)
    note = f"{' against '.join(models)} on held-out prompts of run {base.run}; the first is the baseline"
    return Launch(ctx, config, sources, [note])


def scoring(
    home: Path, run: str | None, sheets: Path | Sequence[Path], request: Request = DEFAULTS
) -> Launch:
    """Continue the run `run` (None: the newest) to score the labels that people wrote into `sheets`.

    Args:
        sheets: the joint sheet, several raters' own files, or a folder of them. They are joined into `labels.csv` in
            the run's folder.
        request: its waivers are added to those of the run.

    Raises:
        UserError: there is no such run or sheet, or the run has no sample to label.
        Mistakes: everything that is wrong in the files.
    """
    from flows.models.compared_models import of_origin

    status = load_status(home, run)
    state = status.stage("human_eval").state
    source = f"run {status.run}"  # its results, which people have seen, are used as they are
    config = check_config(without_removed(run_values(home, status.run), source, PIPELINE), source)
    if config.human_eval.judges != "people" or state in ("not_run", "running", "interrupted"):
        raise UserError(
            f"run {status.run} does not wait for labels (human_eval: {state}, judges: {config.human_eval.judges}). "
            f"Name a run that waits for labels with --run."
        )
    check_access(home)
    records, _ = standing(ArtifactStore(home), status, PIPELINE)
    compared = of_origin(home, status.origin)
    sample = records.get("human_eval.compare" if compared else "human_eval.sample")
    artifact = None if sample is None else ArtifactStore(home).path(sample)
    sheet = joined(home / "runs" / status.run, artifact, sheets)
    if compared:
        sources = compared_sources(config, home, compared, sheet, records)
    else:
        sources = find_sources(config, home, sheet, taken=records)
    ctx = RunContext.resume(
        home, status.run, config.effective_gates, [*status.waivers, *request.waivers], request.user,
        Reuse(pinned=records), execution_of(config), Reporting(config.project, at_end=write_reports),
    )  # fmt: skip
    return Launch(ctx, config, sources, off_gates(config))
