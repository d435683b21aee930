"""SmolLM2-135M with tasks and probes: a whole run offline, the harness' own scores, another policy after it.

`make real-evaluation` fetches SmolLM2 and runs it (docs/benchmarks/evaluation.md has times). Proxies that do not exist
keep what is computed here from the network.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import read_rows
from components.evaluation.config import SHIPPED
from components.store.store import ArtifactStore
from tasks.runs.status import Part, load_status
from tests.bench.policies.evaluated import write_task
from tests.bench.tools import ROOT, tether, with_models
from tests.test_real_data import PREFERENCES, SMALLER

pytestmark = [pytest.mark.real_data, pytest.mark.slow, pytest.mark.timeout(2 * 5400)]

TASKS = dict(zip(("helpful", "harmless"), PREFERENCES, strict=True))
ROWS = 200
"""Of each file of preferences: a model that learns in so few steps needs no more."""
LIMIT = 100
"""Documents of each task."""
OPTIONS = SMALLER | {
    "data.split": "{train: 0.8, calibration: 0.1, test: 0.1}", "generation.max_new_tokens": "24",
    "sft.max_demonstrations": "16", "reward.max_pairs": "32", "reward.probe_texts": "8",
    "reward.lora.rank": "8", "ppo.lora.rank": "8", "ppo.updates": "1", "ppo.batch_size": "8",
    "ppo.minibatch_size": "8", "ppo.micro_batch_size": "8", "ppo.evaluate": "32",
    "ppo.repeats": "{prompts: 8, samples: 1}", "ppo.evaluate_every": "null",
    "evaluation.probes": f"[{','.join(SHIPPED)}]", "evaluation.limit": str(LIMIT), "evaluation.margin": "0.1",
    # One update improves nothing, and 32 prompts leave the shares of rare responses too wide.
    **{f"gates.policy.{name}": "null" for name in ("worse_prompts", "kl_beyond_ceiling", "special_tokens")},
    "gates.validate.pairs": "null", "gates.sft.perplexity_ratio": "null",
}  # fmt: skip
STAGES = ["validate", "sft", "reward", "ppo", "evaluation", "human_eval"]


def parts(home: Path) -> dict[str, Part]:
    """The sub-stages of the newest run's evaluation."""
    return load_status(home).stage("evaluation").parts


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home in which a run with two tasks and all probes waits for people; below TETHER_BENCH_HOME it is kept."""
    fetched = Path(os.environ.get("TETHER_HOME", ROOT / ".tether")) / "models"
    if not PREFERENCES[0].exists() or not (fetched / "smollm2").is_dir():
        pytest.skip("no hh-rlhf: set TETHER_DATA; or no smollm2: run `tether fetch smollm2`")
    kept = os.environ.get("TETHER_BENCH_HOME")
    home = with_models(Path(kept or tmp_path_factory.mktemp("real")) / "evaluated")
    for name, data in TASKS.items():
        write_task(home / f"{name}.yaml", data)
        first = gzip.decompress(data.read_bytes()).splitlines(keepends=True)[:ROWS]
        (home / f"{name}_pairs.jsonl").write_bytes(b"".join(first))
    given = OPTIONS | {
        "data.preferences": f"[{','.join(str(home / f'{name}_pairs.jsonl') for name in TASKS)}]",
        "evaluation.tasks": f"[{','.join(str(home / f'{name}.yaml') for name in TASKS)}]",
    }
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.setenv(variable, "http://127.0.0.1:9")
        patch.setenv("NO_PROXY", "localhost,127.0.0.1")
        settings = [part for each in given.items() for part in ("--set", "=".join(each))]
        done = tether(home, "run", "hh-smollm2", *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        yield home


def test_a_run_with_two_tasks_and_all_probes_is_judged_by_each_gate(home: Path) -> None:
    status = load_status(home)
    assert [stage.name for stage in status.stages] == STAGES
    assert status.stages[-1].state == "awaiting_labels"
    gates = {gate.name.split(".")[1]: gate for gate in status.stage("evaluation").gates}
    assert all(gates[name].value is not None and gates[name].passed for name in ("task_drop", *SHIPPED))
    artifact = ArtifactStore(home).path(str(status.stage("evaluation").digest))
    rows = json.loads((artifact / "evaluation.json").read_text())
    assert {row["name"]: row["items"] for row in rows} == {
        "helpful": LIMIT, "harmless": LIMIT,
        "over_refusal": 94, "harmful": 87, "false_premises": 90, "over_promising": 91,
    }  # fmt: skip


@pytest.mark.parametrize("side", ["sft", "policy"])
def test_scores_are_those_of_the_harness_own_command_line_on_the_exported_folder(
    side: str, home: Path, tmp_path: Path
) -> None:
    run, ours = load_status(home).run, parts(home)[f"evaluation.{side}_tasks"].digest
    exported = tether(home, "export", f"{run}/sft" if side == "sft" else run, str(tmp_path / "model"), "--allow-failed")
    assert exported.returncode == 0, exported.stderr
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={tmp_path}/model,dtype=float32",
        "--device", "cpu", "--batch_size", "16", "--limit", str(LIMIT), "--tasks", ",".join(TASKS),
        "--include_path", ".", "--log_samples",
        "--output_path", str(tmp_path / "theirs"),
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [results] = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]
    artifact = ArtifactStore(home).path(str(ours))
    scores = {row["task"]: row["score"] for row in json.loads((artifact / "tasks.json").read_text())["tasks"]}
    print(side, scores)
    assert scores == {task: theirs[task]["acc,none"] for task in TASKS}
    items: dict[str, list[Any]] = {task: [] for task in TASKS}
    for row in read_rows(artifact / "items.jsonl"):
        items[row["task"]].append(row["value"])
    for task, values in items.items():
        [samples] = (tmp_path / "theirs").rglob(f"samples_{task}_*.jsonl")
        assert values == [row["acc"] for row in sorted(read_rows(samples), key=lambda row: row["doc_id"])]


def test_another_policy_takes_sfts_results(home: Path) -> None:
    before = parts(home)
    done = tether(home, "rerun", "ppo", "--set", "policy_seed=1", "--until", "evaluation")
    assert done.returncode in (0, 3), done.stdout + done.stderr
    said, evaluation = done.stdout + done.stderr, load_status(home).stage("evaluation")
    for kind in ("tasks", "probes"):
        assert evaluation.parts[f"evaluation.sft_{kind}"] == before[f"evaluation.sft_{kind}"]
        assert evaluation.parts[f"evaluation.policy_{kind}"].key != before[f"evaluation.policy_{kind}"].key
        assert evaluation.explained[f"evaluation.sft_{kind}"].outcome == "hit"
        assert f"evaluation.policy_{kind}: computed" in said and f"evaluation.sft_{kind}: computed" not in said
    print(said)
