"""`tether data candidates`: find the models and sample under a key, so that the same command continues its work."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.paths import files_read, holds_model_or_data, read_regular, user_path
from components.data.config import HubConfig
from components.data.formats.prompts import Prompts, read_prompts
from components.data.hub import resolve_source
from components.keys.fingerprint import stage_key
from components.labelling.config import CandidatesJob
from components.labelling.response_candidates import CandidateModel, finished, run
from components.store.store import ArtifactStore, digest_folder
from tasks.result import Input
from tasks.runs.status import load_status
from tasks.stages import TORCH

STAGES = ("sft", "ppo")
"""Stages that produce a language model."""


def make_candidates(
    home: Path,
    job: CandidatesJob,
    source: str,
    models: Sequence[str],
    out: Path,
    report: Callable[[int, int], None],
    on_wait: Callable[[], None] | None = None,
) -> tuple[dict[str, Any], Prompts]:
    """Sample candidates into `out`. If the same call has already finished there, only return its summary.

    Args:
        source: a data file, saved folder or hub name.
        models: for each model its folder or RUN:STAGE.
        report: called with the number of responses done and their total.
        on_wait: called if another process is already computing the same.

    Returns:
        The summary stored in `out`, and the prompts that were read.

    Raises:
        UserError: prompts or models can't be read, or `out` has other content.
    """
    path = resolve_source(source, HubConfig(), home / "datasets", "PROMPTS")
    prompts = read_prompts(path, job.candidates.max_characters)
    candidates = find_models(models, home)
    inputs = {"prompts": Input.of(path).digest, **{f"model {model.name}": model.digest for model in candidates}}
    key, _ = stage_key("candidates", job, inputs, "components.labelling.response_candidates", TORCH)
    if (done := finished(out, key)) is not None:
        return done, prompts
    _check_writable(out)
    store = ArtifactStore(home)
    work = store.work_folder(key)
    with store.lock(key, on_wait) as lease:

        def checked(done: int, total: int) -> None:
            lease.check()
            report(done, total)

        done = finished(out, key) or run(job, prompts, candidates, key, work, out, checked)
        shutil.rmtree(work, ignore_errors=True)
    return done, prompts


def find_models(names: Sequence[str], home: Path, option: str = "--model") -> list[CandidateModel]:
    """Return the models that `names` gives as values of `option`.

    Raises:
        UserError: there is no such folder, run or stage, it has no language model, or a model is given twice.
    """
    by_digest: dict[str, CandidateModel] = {}
    for name in names:
        model = _find_model(name, home, option)
        if model.digest in by_digest:
            raise UserError(
                f"{option} {name}: it is the same model as {option} {by_digest[model.digest].name}. Give it once."
            )
        by_digest[model.digest] = model
    return list(by_digest.values())


def _find_model(name: str, home: Path, option: str) -> CandidateModel:
    path = user_path(name, option)
    if path.is_dir():
        folder = _checked(path, name, option)
        return CandidateModel(name, digest_folder(folder), folder)
    run, _, stage = name.rpartition(":")
    if not run:
        raise UserError(
            f"{option} {name}: there is no such folder (looked for {path.absolute()}). Give the folder of a Hugging "
            f"Face model, or RUN:STAGE, for example {run}:ppo (`tether status` shows the newest run)."
        )
    if stage not in STAGES:
        raise UserError(
            f"{option} {name}: stage {stage or '(empty)'} has no language model; name {' or '.join(STAGES)}."
        )
    if (digest := load_status(home, run).stage(stage).digest) is None:
        raise UserError(f"{option} {name}: run {run} has no {stage} model: that stage has no result.")
    return CandidateModel(name, digest, _checked(ArtifactStore(home).path(digest), name, option))


def _checked(folder: Path, name: str, option: str) -> Path:
    """Return the folder that holds the model's files, after checking that it is a language model."""
    inner = folder / "model" if (folder / "model").is_dir() else folder
    if holds_model_or_data(inner):
        files_read(inner)
    if any(inner.glob("*.gguf")):
        return inner
    kind, kinds = model_kind(inner, f"{option} {name}")
    if any(of.endswith("Classification") for of in kinds) or not _continues_text(kind, kinds):
        raise UserError(
            f"{option} {name}: {inner} holds a {(kinds or [kind])[0]}, which writes no text. Name a language model."
        )
    return inner


def _continues_text(kind: str, kinds: Sequence[str]) -> bool:
    """Return whether a config is a causal language model's: the kind of BERT also has one, which its config names."""
    if any(of.endswith(("ForCausalLM", "LMHeadModel")) for of in kinds):
        return True  # without transformers, which takes seconds to import
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    return causal in kinds or (causal is not None and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def model_kind(folder: Path, named_by: str) -> tuple[str, list[str]]:
    """Return the kind and the classes that the config.json of a model's folder names, such as llama and
    LlamaForCausalLM. Raises UserError if it can't be read."""
    try:
        config = json.loads(read_regular(folder / "config.json"))
        return str(config.get("model_type")), [str(kind) for kind in config.get("architectures") or ()]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{named_by}: {folder} holds no model: its config.json can't be read ({error}).") from error


def _check_writable(out: Path) -> None:
    """Refuse an `out` that can't be written before sampling, not after it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(out.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"--out {out}: {out.parent} can't be written to. Name another folder.")
