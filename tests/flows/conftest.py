"""A home with models as the stages publish them, made by hand: a policy and a reward model with LoRA, and their SFT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.base.hashing import digest_json
from components.base.settings import keyed_values
from components.gates import judging
from components.keys.code_version import code_version
from components.store.store import ArtifactStore, Record
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from tasks.result import Input
from tasks.runs.journal import Done, write_done
from tasks.runs.status import Part, StatusFile, finite
from tasks.stages import STAGES

METRICS: dict[str, dict[str, float]] = {
    "validate": {"data/contract": 1, "data/pairs": 400, "data/leaked_prompts": 0, "data/annotator_agreement": 0.7,
                 "data/annotator_agreement_low": 0.65, "data/prompts_test": 90},
    "sft": {"sft/loss": 1.25, "sft/perplexity": 3.49, "sft/perplexity_ratio": 0.5, "sft/ended": 0.9,
            "sft/loss_high": 1.3, "sft/perplexity_ratio_high": 0.55},
    "reward": {"reward/accuracy": 0.75, "reward/accuracy_low": 0.7, "reward/accuracy_high": 0.8, "reward/ece": 0.031,
               "reward/ece_null_95": 0.044, "reward/test_pairs": 300, "reward/invariance": 0, "reward/shift": 0.5,
               "reward/scale": 2.0, "reward/temperature": 1.5, "reward/position_invariance": 0},
    "ppo": {"policy/kl": 3.5, "policy/kl_high": 3.8, "ppo/stopped": 0, "policy/demonstration_perplexity_ratio": 1.1,
            "policy/demonstration_perplexity_ratio_high": 1.2, "policy/length_ratio": 1.0,
            "policy/length_ratio_low": 0.9, "policy/length_ratio_high": 1.1},
    "human_eval": {"human_eval/win_rate": 0.66, "human_eval/win_rate_low": 0.61, "human_eval/win_rate_high": 0.71,
                   "human_eval/items": 512, "human_eval/labels_complete": 1},
}  # fmt: skip
JUDGE_METRICS: dict[str, dict[str, float]] = {
    "validate.judge": {"data/judge_pairs": 90, "data/judge_contract": 1},
    "reward.judge": {"reward/judge_accuracy": 0.8, "reward/judge_accuracy_low": 0.71,
                     "reward/judge_accuracy_high": 0.87, "reward/judge_ece": 0.05, "reward/judge_test_pairs": 20,
                     "reward/judge_pairs": 50, "reward/judge_shift": 0.25, "reward/judge_scale": 4.0,
                     "reward/judge_temperature": 1.25},
}  # fmt: skip
JUDGE_SCALE = {"shift": 0.25, "scale": 4.0, "temperature": 1.25, "missing_eos_score": -1.2, "responses": 32}
SCALE = {"shift": 0.5, "scale": 2.0, "temperature": 1.5, "missing_eos_score": -1.2, "responses": 32}


class Home(NamedTuple):
    """A home with one run."""

    path: Path
    run: str
    records: dict[str, Record]

    def artifact(self, stage: str) -> Path:
        """The artifact of a stage as a folder."""
        return ArtifactStore(self.path).path(self.records[stage])


def publish_models(
    store: ArtifactStore, config: RunConfig, folders: Mapping[str, Path], run: str, metrics: Mapping[str, Any]
) -> dict[str, Record]:
    """Records of `folders` by stage, each made of those before it, with `metrics` in the place of the usual ones."""
    inputs = {
        "validate": [], "sft": ["data"], "reward": ["data", "sft"], "ppo": ["data", "sft", "reward"],
        "human_eval": [], "validate.judge": [], "reward.judge": ["data", "judge_data", "sft"],
    }  # fmt: skip
    if "reward.judge" in folders:
        inputs["ppo"].append("judge")
    of = {"data": "validate", "judge_data": "validate.judge", "judge": "reward.judge"}
    records: dict[str, Record] = {}
    for stage, folder in folders.items():
        digests = {name: records[of.get(name, name)].digest for name in inputs[stage]}
        job = keyed_values(config.stage_job(STAGES[stage]))
        parts = {"stage": stage, "job": job, "inputs": digests, "source": {}, "libraries": {"torch": "2.13.0"}}
        about = {
            "stage": stage, "inputs": digests, "job": job, "parts": parts, "run": run,
            "metrics": (METRICS | JUDGE_METRICS)[stage] | metrics.get(stage, {}),
            "started": f"2026-11-22T03:0{len(records)}:00+00:00", "environment": {"code": code_version()},
        }  # fmt: skip
        records[stage] = store.publish(digest_json([parts, run]), folder, None, about)
    return records


def describe_run(home: Path, run: str, config: RunConfig, records: Mapping[str, Record], waivers: Any = ()) -> None:
    """The run's folder as a run leaves it: config, status, and what each stage gave."""
    from flows.config.run_config import to_values
    from flows.config.yaml import dump

    status = StatusFile.start(home / "runs" / run, run, "tiny", list(METRICS))
    (status.folder / "config.yaml").write_text(dump(to_values(config)))
    for stage, record in records.items():
        shown = STAGES[stage].group
        if shown != stage:
            parts = {**status.stage(shown).parts, stage: Part(key=record.key, digest=record.digest)}
            status.update(shown, parts=parts, metrics=finite(record.metrics))
            continue
        metrics = status.stage(stage).metrics | dict(record.metrics)
        verdicts = judging.judge(stage, metrics, config.effective_gates, waivers)
        state = "gate_failed" if any(each.stops for each in verdicts) else "passed"
        state = "waived" if any(each.waived for each in verdicts) else state
        status.update(
            stage, state=state, key=record.key, digest=record.digest, metrics=finite(metrics),
            gates=list(verdicts),
        )  # fmt: skip
        inputs = [Input(name=name, digest=digest, path=home, stage="x") for name, digest in record.inputs.items()]
        done = Done(
            time=1_767_225_600_000, record=record, path=home, run=run, user="mallory", step=0,
            verdicts=verdicts, inputs=inputs, attachments={},
        )  # fmt: skip
        write_done(status.folder, done)
        if state == "gate_failed":
            break
    status.finish()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts by stage as the stages write them; the models' weights are random."""
    import json

    import torch

    from components.models.adapters import Backbone, save_adapter
    from components.models.config import AdapterConfig, ScratchModel
    from components.models.folders import build_causal_lm, load_causal_lm, load_reward_model, save_model
    from components.models.runtime import Runtime
    from components.models.tokenizers import train_tokenizer

    folder, runtime = tmp_path_factory.mktemp("models"), Runtime(device="cpu", dtype="float32", threads=1)
    found = {stage: folder / stage for stage in METRICS}
    for stage in ("validate", "human_eval"):
        found[stage].mkdir()
        (found[stage] / "rows.jsonl").write_text(f"{stage}\n")
    tokenizer = train_tokenizer(["my parcel is late and broken", "we will replace what is broken"], 512)
    scratch = ScratchModel(hidden_size=16, layers=2, heads=2)
    save_model(build_causal_lm(scratch, tokenizer, 64, seed=1), tokenizer, found["sft"] / "model")
    generator = torch.Generator().manual_seed(3)
    for stage in ("reward", "ppo"):
        if stage == "reward":
            whole, _ = load_reward_model(found["sft"], runtime, seed=2)
        else:
            whole, _ = load_causal_lm(found["sft"], runtime)
        view = Backbone(whole).add("one", AdapterConfig(rank=2), seed=0, score=getattr(whole, "score", None))
        with torch.no_grad():
            for weight in view.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
        save_model(view, tokenizer, found[stage] / "model")
        save_adapter(view, found[stage] / "adapter")
    (found["reward"] / "reward.json").write_text(json.dumps(SCALE))
    (found["ppo"] / "samples.jsonl").write_text("{}\n")
    return found


@pytest.fixture
def make_home(tmp_path: Path, model_folders: dict[str, Path]) -> Any:
    """`make_home(*settings, waivers=..., metrics=..., judge=...)`: a home with one run of tiny with `settings`, with an
    independent judge where asked."""
    import json
    import shutil

    def make(*settings: str, waivers: Any = (), metrics: Mapping[str, Any] | None = None, judge: bool = False) -> Home:
        home, run = tmp_path / "home", "20261122-030000-abcd"
        config = load_config("tiny", [parse_override(each) for each in settings]).resolved()
        order = (*(["validate.judge"] if judge else []), "validate", "sft", *(["reward.judge"] if judge else []))
        copies = {stage: tmp_path / "copies" / stage for stage in (*order, "reward", "ppo", "human_eval")}
        for stage, copy in copies.items():
            shutil.copytree(model_folders[stage.partition(".judge")[0]], copy)
        if judge:
            (copies["validate.judge"] / "rows.jsonl").write_text("careful\n")
            (copies["reward.judge"] / "reward.json").write_text(json.dumps(JUDGE_SCALE))
        records = publish_models(ArtifactStore(home), config, copies, run, metrics or {})
        describe_run(home, run, config, records, waivers)
        return Home(home, run, records)

    return make
