"""Find a run's external inputs: data files, models and the filled rating sheet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.base.errors import UserError
from components.base.paths import user_path
from components.data.inputs import (
    DECONTAMINATE,
    FILES,
    JUDGE,
    REFERENCE,
    SUITE,
    VOTES,
    kind_of,
    label_of,
    refuse_unknown_sources,
    values_of,
)
from components.evaluation.config import Kind
from components.human_eval.batch.halves import HELD_OUT
from components.human_eval.blinding import SECRET, home_secret
from components.models.weights import as_folder, check_weights
from components.reward.suites.suite_formats import SUITES, read_suite
from components.store.graph import Graph
from components.store.store import ArtifactStore, Record
from flows.config.run_config import RunConfig
from flows.data.data_files import find_files
from flows.data.evaluation_inputs import evaluation_inputs
from flows.data.pretrained import check_template, find_base
from flows.data.reference import find_reference, stored_input
from flows.data.reward_sources import model_sources, reward_model
from tasks.result import Input
from tasks.runs.journal import recorded_inputs
from tasks.runs.status import RunStatus, load_status
from tasks.stages import reaches


@dataclass(frozen=True)
class Sources:
    """The external inputs of a run, with their digests. A dict is empty if the config names nothing for it."""

    data: dict[str, Input] = field(default_factory=dict)
    """`preferences` (or `preferences/LABEL` for each of several), `demonstrations`, `prompts`, `suite`,
    `decontaminate`, `deployment_prompts`, `votes/1` and so on, `reference`. Without preferences the built-in task is
    generated."""
    base: dict[str, Input] = field(default_factory=dict)
    """`base`: the folder of the pretrained model."""
    previous: dict[str, Input] = field(default_factory=dict)
    """`previous_reward` and `previous_data`: artifacts of the earlier run whose reward model is refreshed."""
    sheet: Input | None = None
    """The ratings that people filled in, if any."""
    blinding: dict[str, Input] = field(default_factory=dict)
    """`seal`: the home's secret, with which the key to people's rating sheet is sealed."""
    taught: Input | None = None
    """The data that the SFT model was trained on, if it is kept from an earlier run."""
    rewards: dict[str, Input] = field(default_factory=dict)
    """`rewards/NAME`: the folder of each further reward model that `ppo.rewards` names."""
    judge: dict[str, Input] = field(default_factory=dict)
    """`judge_preferences`, or `judge_preferences/LABEL` for each of several."""
    suites: dict[str, Input] = field(default_factory=dict)
    """`suites/NAME`: each file of judged pairs that `reward.suites` names."""
    evaluation: dict[Kind, dict[str, Input]] = field(default_factory=dict)
    """Of tasks `tasks/NAME`: the YAML of each of `evaluation.tasks`; `tasks/NAME/1` and so on: its other files. Of
    probes `probes/NAME`: each file of `evaluation.probes`; `judge`: the model of `evaluation.judge`."""
    compared: dict[str, Input] = field(default_factory=dict)
    """`data` and `model_1` to `model_k`, if the run only compares models."""

    @property
    def contract(self) -> dict[str, Input]:
        """Return the entries of `data` that the judge's pairs are checked against too: the user's suite and
        `decontaminate`."""
        return {name: source for name, source in self.data.items() if kind_of(name) in (SUITE, DECONTAMINATE)}


PREVIOUS = ("previous_reward", "previous_data")


def find_sources(
    config: RunConfig, home: Path, sheet: Path | None = None, taken: Mapping[str, Record] | None = None,
    again: str | None = None, until: str | None = None,
) -> Sources:  # fmt: skip
    """Find and digest the inputs that `config` names; relative paths are relative to the current directory.

    Args:
        taken: the records of the stages that are not recomputed, by stage. A source that only these stages read may
            have been deleted; its digest comes from the record.
        again: the earlier run that this one retries or reruns (as in `find_reference`).
        until: the run's last stage; None is the pipeline's. What only later stages read is not looked for.

    Raises:
        UserError: a source is missing or can't be read, a data file has no valid row, two preference files are
            identical, `data.sources` names what is no source, or the pretrained model differs from the one that a
            reused stage was computed with.
    """
    taken = taken or {}
    if sheet is not None and not sheet.is_file():
        raise UserError(f"{sheet}: there is no such file. Give the filled rating sheet (CSV or JSONL).")
    data = _data_of(taken["validate"], config, home) if "validate" in taken else _read_now(config, home, again)
    return Sources(
        data,
        _base(config, home, taken),
        _previous(config, home, taken) if reaches("reward", until) else {},
        None if sheet is None else Input.of(sheet),
        _blinding(config, home, taken),
        _taught(config, home, taken),
        _rewards(config, home, taken) if reaches("ppo", until) else {},
        _judge(config, home, taken, data),
        _suites(config, taken) if reaches("reward", until) else {},
        evaluation_inputs(config, home, taken) if reaches("evaluation", until) else {},
    )


def compared_sources(
    config: RunConfig, home: Path, compared: dict[str, Input], sheet: Path | None = None,
    taken: Mapping[str, Record] | None = None,
) -> Sources:  # fmt: skip
    """Return the inputs of a run that compares the models of `compared`.

    Raises:
        UserError: the sheet can't be read.
    """
    blinding = _blinding(config, home, taken or {}, "human_eval.compare")
    return Sources(sheet=None if sheet is None else Input.of(sheet), blinding=blinding, compared=compared)


def _read_now(config: RunConfig, home: Path, again: str | None) -> dict[str, Input]:
    """Return the inputs of `validate`, including earlier votes and the reference to compare with."""
    data: dict[str, Input] = {}
    for kind in FILES:
        data |= find_files(kind, config, home)
    refuse_unknown_sources(config.data.sources, data)
    preferences = [source.digest for name, source in data.items() if kind_of(name) == "preferences"]
    return data | _votes(config, home) | find_reference(config, home, preferences, again)


def _judge(config: RunConfig, home: Path, taken: Mapping[str, Record], data: Mapping[str, Input]) -> dict[str, Input]:
    """Return the judge's preferences; if the judge's `validate` is reused, as they were when it read them."""
    if "validate.judge" in taken:
        return _data_of(taken["validate.judge"], config, home, (JUDGE,))
    if config.data.judge_preferences is None:
        return {}
    files = find_files(JUDGE, config, home)
    rewarding = {source.digest: source.path for name, source in data.items() if kind_of(name) == "preferences"}
    for file in files.values():
        if file.digest in rewarding:
            raise UserError(
                f"data.{JUDGE}: {file.path} holds the same bytes as {rewarding[file.digest]} of data.preferences. A "
                "judge trained on the reward model's own pairs shares its errors: give the judge other labels."
            )
    return files


def _rewards(config: RunConfig, home: Path, taken: Mapping[str, Record]) -> dict[str, Input]:
    models = {}
    for name, model in model_sources(config).items():
        recorded = taken["ppo"].inputs.get(f"rewards/{name}") if "ppo" in taken else None
        path = Path(model.source.removeprefix("model:"))
        reused = None if recorded is None else Input(digest=recorded, path=path)
        models[f"rewards/{name}"] = reused or Input.of(reward_model(model, home)[1])
    return models


def _suites(config: RunConfig, taken: Mapping[str, Record]) -> dict[str, Input]:
    if "reward" in taken:
        recorded = {name: digest for name, digest in taken["reward"].inputs.items() if name.startswith(f"{SUITES}/")}
        files = {f"{SUITES}/{name}": Path(file) for name, file in config.reward.suites.items()}
        return {name: Input(digest=digest, path=files.get(name, Path(name))) for name, digest in recorded.items()}
    suites = {}
    for name, file in config.reward.suites.items():
        path = user_path(file, field := f"reward.suites.{name}")
        try:
            read_suite(path)
        except UserError as error:
            raise UserError(f"{field}: {error}") from error
        suites[f"{SUITES}/{name}"] = Input.of(path)
    return suites


def _votes(config: RunConfig, home: Path) -> dict[str, Input]:
    """Return people's votes from the runs that `data.votes` names: `votes/1` for the first run."""
    votes = {}
    for number, run in enumerate(config.data.votes, 1):
        stage = _status(run, home, "data.votes").stage("human_eval")
        store = ArtifactStore(home)
        if stage.digest is None or not (path := store.path(stage.digest)).joinpath(HELD_OUT).is_file():
            raise UserError(
                f"data.votes: people have not judged the policy of run {run} (human_eval: {stage.state}). Score it "
                f"with `tether people score`, or name another run."
            )
        votes[f"{VOTES}/{number}"] = stored_input(store, stage.digest, path)
    return votes


def kept_sft(config: RunConfig, home: Path) -> dict[str, Record]:
    """Return the record of the SFT model that `sft.keep` names; empty if the run trains its own.

    Raises:
        UserError: there is no such run, or its SFT model is not complete in the store.
    """
    if config.sft.keep is None:
        return {}
    stage = _status(config.sft.keep, home, "sft.keep").stage("sft")
    record = ArtifactStore(home).lookup(stage.key, stage.digest) if stage.key and stage.digest else None
    if not isinstance(record, Record):
        why = f"it has none ({stage.state})" if record is None else record.reason
        raise UserError(
            f"sft.keep = {config.sft.keep}: its SFT model can't be reused: {why}. "
            f"`tether rerun sft --from {config.sft.keep}` computes it again."
        )
    return {"sft": record}


def _taught(config: RunConfig, home: Path, taken: Mapping[str, Record]) -> Input | None:
    """Return the data that a kept SFT model was trained on; reusing its record requires the same data."""
    if config.sft.keep is None:
        return None
    digest = (taken.get("sft") or kept_sft(config, home)["sft"]).inputs["data"]
    return Input(digest=digest, path=ArtifactStore(home).path(digest), stored=True)


def _status(run: str, home: Path, field: str) -> RunStatus:
    try:
        return load_status(home, run)
    except UserError as error:
        raise UserError(f"{field} = {run}: {error} Name a run of this home.") from error


def _data_of(validated: Record, config: RunConfig, home: Path, kinds: Sequence[str] = FILES) -> dict[str, Input]:
    """Return the data of these kinds that a stage was computed from, with the paths they were read from if known."""
    data: dict[str, Input] = {}
    recorded = recorded_inputs(home, [validated.run])
    for name, digest in validated.inputs.items():
        if kind_of(name) in kinds:
            values = values_of(getattr(config.data, kind_of(name)))
            source = recorded.get(digest, Input(digest=digest, path=Path(label_of(name))))
            path = source.path if source.hub or len(values) > 1 else Path(values[0])
            data[name] = Input(digest=digest, path=path, hub=source.hub)
        elif kind_of(name) in (VOTES, REFERENCE):
            data[name] = Input(digest=digest, path=ArtifactStore(home).path(digest), stored=True)
    return data


def _base(config: RunConfig, home: Path, taken: Mapping[str, Record]) -> dict[str, Input]:
    if config.sft.base is None:
        return {}
    read = {stage: taken[stage].inputs.get("base") for stage in ("validate", "sft") if stage in taken}
    if (digest := read.get("sft")) and read.get("validate") == digest:
        return {"base": Input(digest=digest, path=Path(config.sft.base))}
    folder = find_base(config.sft.base, home)
    with as_folder(folder) as model:
        check_weights(model, "sft.base")
        if not any((model / "config.json").exists() or path.suffix == ".gguf" for path in model.iterdir()):
            raise UserError(f"sft.base: {folder} holds weights and no config.json, which says what model they are.")
    check_template(config, folder)
    base = Input.of(folder)
    for stage, digest in read.items():
        if digest != base.digest:
            raise UserError(
                f"sft.base = {config.sft.base}: this is not the model that {stage} was computed with, and this rerun "
                f"reuses that {stage}. Pass the original model, or rerun from validate."
            )
    return {"base": base}


def _blinding(
    config: RunConfig, home: Path, taken: Mapping[str, Record], stage: str = "human_eval.sample"
) -> dict[str, Input]:
    """Return the home's secret, created on first use; for a reused sample, the secret it was sealed with."""
    if config.human_eval.judges != "people":
        return {}  # simulated judges need no blinding, and so the demo gives the same bytes in every home
    if (sample := taken.get(stage)) is None:
        return {"seal": Input.of(home_secret(home))}
    digest = sample.inputs.get("seal")
    return {} if digest is None else {"seal": Input(digest=digest, path=home / SECRET)}


def _previous(config: RunConfig, home: Path, taken: Mapping[str, Record]) -> dict[str, Input]:
    """Return the reward model that `reward.refresh.from_run` names, and the data it was trained on."""
    if config.reward.refresh is None:
        return {}
    store, run = ArtifactStore(home), config.reward.refresh.from_run
    if reused := taken.get("reward"):
        paths = {digest: Path(name) for name, digest in reused.inputs.items() if name in PREVIOUS}
        digests = {name: reused.inputs[name] for name in PREVIOUS if name in reused.inputs}
    else:
        status = _status(run, home, "reward.refresh.from_run")
        reward, data = (status.stage(name).digest for name in ("reward", "validate"))
        if reward is None or data is None:
            raise UserError(
                f"reward.refresh.from_run = {run}: that run has no reward model, because its reward stage has no "
                "result. Name a run that got past reward (`tether status RUN` shows how far a run got)."
            )
        digests = dict(zip(PREVIOUS, (reward, data), strict=True))
        paths = {digest: store.path(digest) for digest in digests.values()}
    imported = Graph.of(store).rests_on_import(digests.values())
    return {
        name: Input(digest=digest, path=paths[digest], stored=True, imported=imported)
        for name, digest in digests.items()
    }
