"""Export a model from the store as a Hugging Face folder, for `from_pretrained`, vLLM and the hub."""

from pathlib import Path

from components.base.errors import UserError
from components.base.files import whole_folder
from components.base.jsonl import write_json
from components.gates.gate_text import outcome
from components.models.weights import check_weights
from components.store.store import ArtifactStore, Miss
from flows.models.card import card
from flows.models.model_facts import ModelFacts, model_facts
from flows.reports.run_facts import code_name
from tasks.model_folder import copy_model
from tasks.runs.status import gates_json


def export(home: Path, name: str, folder: Path, allow_failed: bool = False) -> ModelFacts:
    """Write the model that `name` names into `folder`, completely or not at all, and return its facts.

    The folder holds the model, its tokenizer and chat template, README.md (its card) and lineage.json. A LoRA model is
    merged, and `adapter/` holds the adapter in peft's format. A reward model's config.json has `score_scale`; the
    further members of an ensemble are in `members/`.

    Args:
        home: the Tether home.
        name: as in `model_facts`.
        folder: a new or empty folder; its parents are created.
        allow_failed: export the model even if gates failed or PPO was stopped; the top of its card says so.

    Raises:
        UserError: there is no such model, `folder` is not empty, the model failed, or the store's copy is damaged.
    """
    facts = model_facts(home, name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: this is a file, or a folder that is not empty. Name a new folder.")
    if facts.failures and not allow_failed:
        raise UserError(
            f"{name}: this model failed ({'; '.join(facts.failures)}). Choose another (`tether lineage {name}` shows "
            f"what it was made of), or export it anyway with --allow-failed; its card will say that it failed."
        )
    store, record = ArtifactStore(home), facts.record
    intact = store.lookup(record.key, record.digest)
    if isinstance(intact, Miss):
        raise UserError(
            f"{name}: the store no longer has an intact copy ({intact.reason}). `tether reproduce "
            f"{record.digest[:16]}` computes it again, or import a run that includes it (`tether store import`)."
        )
    text = card(facts)  # first, because it refuses records that no stage writes
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder.absolute()) as out:
        copy_model(store.path(intact), intact, out)
        for model in (out, *out.glob("members/*")):
            check_weights(model, name)
        (out / "README.md").write_text(text, encoding="utf-8")
        write_json(out / "lineage.json", lineage_json(facts))
    return facts


def lineage_json(facts: ModelFacts) -> dict[str, object]:
    """Return what the model was made of and how it was judged, as JSON values.

    `made` lists the artifacts in the order in which they were made, `sources` the external inputs, and `run` the run
    whose gates judge the model.
    """
    return {
        "model": facts.name,
        "versions": [version.version for version in facts.versions],
        "kind": facts.kind,
        "digest": facts.record.digest,
        "key": facts.record.key,
        "files": facts.record.files,
        "run": facts.run,
        "failures": facts.failures,
        "made": [
            {
                **record.model_dump(include={"stage", "digest", "key", "inputs", "run", "started"}),
                "seed": record.job.get("seed"),
                "code": record.environment.get("code") or code_name({}),
                "libraries": record.parts.get("libraries", {}),
            }
            for record in facts.made
        ],
        "sources": {node.digest: list(node.names) for node in facts.upstream if not node.records},
        "options": {name: option._asdict() for name, option in facts.options.items()},
        "gates": [
            {**fields, "outcome": outcome(gate)}
            for fields, gate in zip(gates_json(facts.gates), facts.gates, strict=True)
        ],
        "waivers": [waiver.model_dump() for waiver in facts.waivers],
        "promoted": facts.promoted,
    }
