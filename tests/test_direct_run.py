"""The real command with a direct method: its stages, views, keys and byte-for-byte reproduction, beside PPO's."""

from pathlib import Path
from typing import Any

import pytest

from components.data.support_desk.desk import SupportDeskConfig, generate
from flows.models.model_export import export
from flows.models.reproduce import reproduce
from flows.reports.run_facts import run_facts
from tasks.runs.status import RunStatus, list_runs, load_status
from tests.faults.homes import Home, Moment
from tests.splits import write

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def home(whole: tuple[Home, list[Moment]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the home after one whole run, by PPO."""
    return whole[0].copy(tmp_path_factory.mktemp("direct") / "home").path


def newest(home: Path) -> RunStatus:
    return load_status(home, list_runs(home)[0])


@pytest.mark.parametrize("method", ["dpo", "ipo", "kto"])
def test_a_method_changes_the_policys_stage_alone(method: str, home: Path, tether: Any) -> None:
    before = newest(home)
    done = tether("run", "tiny", "--set", f"policy.method={method}", home=home)
    assert done.returncode == 0, done.stderr
    status = newest(home)
    assert status.state == "passed" and status.title("ppo") == f"ppo ({method})"
    assert [stage.name for stage in status.stages if not stage.cached] == ["ppo", "human_eval"]
    assert [s.digest for s in status.stages[:3]] == [s.digest for s in before.stages[:3]]
    assert f"ppo ({method})" in done.stdout and "gates are off because" in done.stdout
    gates = {gate.name: gate for gate in status.stage("ppo").gates}
    assert gates["policy.chosen_log_ratio"].threshold == -5 and gates["ppo.ratio_max"].threshold is None
    assert gates["ppo.ratio_max"].reason == f"policy.method={method} has no PPO updates"
    page = (home / "runs" / status.run / "report.html").read_text()
    assert f"trained by {method.upper()}" in page and f"ppo ({method})" in page
    facts = run_facts(home, status.run).stage("ppo")
    assert facts.curves["direct/loss"] and facts.charts["log_ratios"].svg and f"Trained by {method}" in facts.choice


@pytest.mark.parametrize("method", ["best_of_n", "online_dpo"])
def test_a_method_that_samples_has_a_page_and_a_card(method: str, home: Path, tether: Any, tmp_path: Path) -> None:
    few = ["policy.max_prompts=8", "policy.n=2"] if method == "best_of_n" else ["ppo.updates=2"]
    changes = [word for change in (f"policy.method={method}", *few) for word in ("--set", change)]
    done = tether("run", "tiny", *changes, home=home)
    status = newest(home)
    assert (home / "runs" / status.run / "report.html").exists(), done.stderr
    facts = run_facts(home, status.run)
    kl, title = ("not used by best_of_n", "BEST OF N") if method == "best_of_n" else ("fixed", "ONLINE DPO")
    assert status.stage("ppo").digest and facts.policy.tether["control"] == kl, done.stderr
    page = (home / "runs" / status.run / "report.html").read_text()
    assert f"trained by {title}" in page and "no chart is stored" not in page
    export(home, status.run, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    told = "that a reward model chose among several of its own" if method == "best_of_n" else "by online DPO on pairs"
    assert told in card and f"- {method}" in card


def test_a_changed_option_recomputes_the_policy(home: Path, tether: Any) -> None:
    done = tether("run", "tiny", "--set", "policy.method=dpo", home=home)
    assert done.returncode == 0 and all(stage.cached for stage in newest(home).stages[:4]), done.stderr
    first = newest(home).stage("ppo").digest
    done = tether("rerun", "ppo", "--set", "policy.beta=0.5", home=home)
    assert done.returncode == 0 and newest(home).stage("ppo").digest != first, done.stderr
    done = tether("rerun", "ppo", "--set", "ppo.updates=9", home=home)
    assert done.returncode == 2 and "ppo.updates has no effect with policy.method=dpo" in done.stderr


def test_a_policy_of_pairs_is_reproduced_and_exported(home: Path, tether: Any, tmp_path: Path) -> None:
    run = newest(home)
    assert reproduce(home, run.run).same
    export(home, run.run, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "trained on preference pairs by DPO" in card and "- dpo" in card
    artifact = run_facts(home, run.run).stage("ppo")
    assert artifact.record is not None and artifact.record.job["policy"]["method"] == "dpo"


def test_a_policy_is_an_adapter(home: Path, tether: Any) -> None:
    changes = ("policy.method=dpo", "policy.lora.rank=4", "reward.lora.rank=4")
    done = tether("run", "tiny", *(word for change in changes for word in ("--set", change)), home=home)
    assert done.returncode == 0, done.stderr
    facts = run_facts(home, newest(home).run).stage("ppo")
    assert facts.text("adapter/adapter_config.json")


def test_single_labels_come_from_a_file_to_kto(home: Path, tether: Any, tmp_path: Path) -> None:
    """Pairs and a file of KTO rows: their numbers stand on the page and in the metrics of the policy."""
    demonstrations, pairs = generate(0, SupportDeskConfig(demonstrations=60, pairs=120))
    keep = ("prompt", "chosen", "rejected")
    files = {
        "preferences": write(tmp_path / "pairs.jsonl", ({name: row[name] for name in keep} for row in pairs)),
        "demonstrations": write(tmp_path / "kto.jsonl", (
            {"prompt": row["prompt"], "completion": text, "label": label}
            for row in demonstrations for text, label in ((row["response"], True), (f"No. {row['response']}", False))
        )),
    }  # fmt: skip
    changes = ["policy.method=kto", *(f"data.{kind}={path}" for kind, path in files.items())]
    done = tether("run", "tiny", *(word for change in changes for word in ("--set", change)), home=home)
    status = newest(home)
    metrics = status.stage("validate").metrics
    assert metrics["data/desirable"] > 50 < metrics["data/undesirable"], done.stderr
    policy = status.stage("ppo").metrics
    assert policy["direct/single_labels"] == metrics["data/single_labels_train"], done.stderr
    assert 0.9 < policy["direct/desirable_ratio"] <= 1.1
    page = (home / "runs" / status.run / "report.html").read_text()
    assert "<dt>single labels: undesirable</dt>" in page and '<th scope="row">single labels</th>' in page
    checked = tether("data", "check", str(files["demonstrations"]), home=home)
    assert "desirable single labels kept" in " ".join(checked.stdout.split()), checked.stdout
