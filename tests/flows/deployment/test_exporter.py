"""What Prometheus gets of the runs of a home, and whether the dashboard's queries find it."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running
from prometheus_client.core import Metric

from components.gates.judging import Verdict
from flows.config.run_config import load_config, to_values
from flows.deployment import flows, register
from flows.deployment.exporter import RECENT_SECONDS, Queued, RunCollector, queues
from flows.deployment.servers import free_port
from tasks.runs.points import Spool, points_file, read_points
from tasks.runs.status import StatusFile, load_status
from tests.servers import PrefectServer, clean_environment
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "infra" / "grafana" / "tether.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"].replace("$run", ".*") for panel in DASHBOARD["panels"] for target in panel["targets"]]
TRAINING = {"ppo/proxy_reward": 0.5, "ppo/kl": 2.0, "ppo/beta": 0.1, "ppo/response_tokens": 30.0, "ppo/entropy": 1.5}

Sample = tuple[dict[str, str], float]


def samples(found: Iterator[Metric], name: str, **labels: str) -> list[Sample]:
    """The samples of `tether_<name>` that have these labels."""
    return [
        (sample.labels, sample.value)
        for family in found for sample in family.samples
        if sample.name == f"tether_{name}" and labels.items() <= sample.labels.items()
    ]  # fmt: skip


def value(collector: RunCollector, name: str, **labels: str) -> float:
    found = samples(collector.collect(), name, **labels)
    assert len(found) == 1, found
    return found[0][1]


def begin(home: Path, run: str) -> StatusFile:
    """A run of this process, whose PPO is at step 40 of 100."""
    status = StatusFile.start(home / "runs" / run, run, "demo", ("validate", "sft", "ppo"))
    status.begin("ppo")
    spool = Spool(points_file(home / "runs" / run, "ppo"))
    for step in range(1, 41):
        spool.append(step, TRAINING | {"ppo/kl": step / 20}, total=100, tokens=5000)
    spool.close()
    sft = Spool(points_file(home / "runs" / run, "sft"))
    sft.append(7, {"sft/train_loss": 1.25}, total=7)
    sft.close()
    return status


def test_a_running_stage_is_shown_with_its_step_and_newest_metrics(tmp_path: Path) -> None:
    begin(tmp_path, "live")
    collector = RunCollector(tmp_path)
    ppo = {"run": "live", "profile": "demo", "stage": "ppo"}
    assert value(collector, "stage_state", **ppo, state="running") == 1
    assert (value(collector, "stage_step", **ppo), value(collector, "stage_steps", **ppo)) == (40, 100)
    assert value(collector, "stage_metric", **ppo, metric="ppo/kl") == 2.0
    assert time.time() - value(collector, "stage_point_timestamp_seconds", **ppo) < 60
    assert value(collector, "runs", state="running") == 1 and value(collector, "runs", state="passed") == 0
    assert value(collector, "home_free_bytes") > 0


def test_points_written_after_the_first_answer_are_in_the_next_one_even_if_one_was_torn(tmp_path: Path) -> None:
    begin(tmp_path, "live")
    collector, path = RunCollector(tmp_path), points_file(tmp_path / "runs" / "live", "ppo")
    assert value(collector, "stage_step", stage="ppo") == 40
    whole = json.dumps({"step": 41, "time": 1, "metrics": {"ppo/kl": 9.0}}) + "\n"
    with path.open("a") as file:
        file.write(whole[:20])
    assert value(collector, "stage_step", stage="ppo") == 40
    with path.open("a") as file:
        file.write(whole[20:])
    assert value(collector, "stage_step", stage="ppo") == 41
    assert value(collector, "stage_metric", metric="ppo/kl") == 9.0


def test_gates_that_are_off_are_left_out_and_a_waived_one_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    def verdict(name: str, **fields: Any) -> Verdict:
        told = {"metric": "ppo/kl_high", "value": 3.0, "op": "<=", "threshold": 2.0, "passed": False}
        return Verdict.model_validate({"name": name, **told, **fields})

    gates = [
        verdict("ppo.kl"), verdict("ppo.echo", waived=True), verdict("ppo.ratio_max", warn_only=True),
        verdict("ppo.ended", passed=True), verdict("ppo.evaluated", threshold=None), verdict("ppo.stopped", value=None),
    ]  # fmt: skip
    begin(tmp_path, "live").update("ppo", gates=gates)
    collector = RunCollector(tmp_path)
    passed = {labels["gate"]: number for labels, number in samples(collector.collect(), "gate_passed")}
    assert passed == {"ppo.kl": 0, "ppo.echo": 0.5, "ppo.ratio_max": 0.5, "ppo.ended": 1, "ppo.stopped": 0}
    assert {labels["gate"] for labels, _ in samples(collector.collect(), "gate_value")} == {*passed} - {"ppo.stopped"}


def test_a_run_that_ended_long_ago_is_counted_and_not_shown_and_a_damaged_one_hides_no_other(tmp_path: Path) -> None:
    begin(tmp_path, "old").finish()
    begin(tmp_path, "new").finish()
    hours_ago = time.time() - RECENT_SECONDS - 60
    os.utime(tmp_path / "runs" / "old" / "run.json", (hours_ago, hours_ago))
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "run.json").write_text("{")
    collector = RunCollector(tmp_path)
    assert {labels["run"] for labels, _ in samples(collector.collect(), "stage_state")} == {"new"}
    assert value(collector, "runs", state="interrupted") == 2 and value(collector, "runs", state="damaged") == 1


def test_a_prefect_server_that_is_away_is_said_and_hides_no_run(tmp_path: Path) -> None:
    begin(tmp_path, "live")

    def away() -> Queued:
        raise ConnectionError

    collector = RunCollector(tmp_path, away)
    assert value(collector, "prefect_up") == 0 and value(collector, "stage_step", stage="ppo") == 40
    there = RunCollector(tmp_path, lambda: {("gpu", "default", "scheduled"): 3})
    assert value(there, "prefect_up") == 1
    assert value(there, "queue_runs", pool="gpu", queue="default", state="scheduled") == 3
    assert not samples(RunCollector(tmp_path).collect(), "prefect_up"), "there is none to be away"


@pytest.mark.whole
def test_what_is_told_of_a_whole_run_is_what_its_files_say(whole: Any) -> None:
    home = whole[0].path
    status, collector = load_status(home), RunCollector(home)
    assert {labels["stage"] for labels, _ in samples(collector.collect(), "stage_state")} == {
        stage.name for stage in status.stages
    }
    for stage in status.stages:
        latest: dict[str, float] = {}
        for point in read_points(points_file(home / "runs" / status.run, stage.name)):
            latest |= point["metrics"]
        told = samples(collector.collect(), "stage_metric", run=status.run, stage=stage.name)
        assert {labels["metric"]: number for labels, number in told} == pytest.approx(latest, nan_ok=True)
        judged = {gate.name: gate.value for gate in stage.gates if gate.threshold is not None}
        values = samples(collector.collect(), "gate_value", run=status.run, stage=stage.name)
        assert {labels["gate"]: number for labels, number in values} == {
            k: v for k, v in judged.items() if v is not None
        }


def test_prometheus_can_ask_over_http_until_the_command_is_ended(
    tmp_path: Path, start_tether: Callable[..., "subprocess.Popen[str]"], tether: Any
) -> None:
    begin(tmp_path, "live")
    process = start_tether("metrics", "--port", "0", home=tmp_path)
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", process.stdout.readline())
    assert found is not None
    text = urllib.request.urlopen(found[0], timeout=60).read().decode()
    assert 'tether_stage_step{profile="demo",run="live",stage="ppo"} 40.0' in text
    taken = tether("metrics", "--port", found[1], home=tmp_path)
    assert taken.returncode == 2 and "Give another one." in taken.stderr and "Traceback" not in taken.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE * 30) == 0


def queue_runs(server: PrefectServer, home: Path) -> dict[str, int]:
    """Order three runs in the pool `metered`, of which one runs; return what `queues` counts there, by state."""
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        register._make_pool("metered")
        register._register(flows.rlhf, "metered", "metered", home, {"config": to_values(load_config("tiny"))})
        deployment = client.read_deployment_by_name("rlhf/metered")
        for state in (None, None, Running()):
            client.create_flow_run_from_deployment(deployment.id, state=state)
        return {state: runs for (pool, _, state), runs in queues().items() if pool == "metered"}


@pytest.mark.servers
def test_runs_that_wait_in_a_pool_are_counted_by_state(server: PrefectServer, tmp_path: Path) -> None:
    assert queue_runs(server, tmp_path) == {"scheduled": 2, "running": 1}


@pytest.mark.servers
def test_a_real_prometheus_finds_data_for_every_query_of_the_dashboard(
    server: PrefectServer, tmp_path: Path, start_tether: Callable[..., "subprocess.Popen[str]"]
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    home = tmp_path / "home"
    failed = {"metric": "ppo/kl_high", "value": 3.0, "op": "<=", "threshold": 2.0, "passed": False}
    begin(home, "live").update("ppo", gates=[Verdict.model_validate({"name": "ppo.kl", **failed})])
    queue_runs(server, home)
    ports = free_port(0), free_port(0)
    exporter = start_tether("metrics", "--port", str(ports[0]), home=home, PREFECT_API_URL=server.api)
    config = (ROOT / "infra" / "prometheus.yml").read_text().replace("15s", "1s").replace("9469", str(ports[0]))
    (tmp_path / "prometheus.yml").write_text(config)
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
               f"--web.listen-address=127.0.0.1:{ports[1]}", "--log.level=warn"]  # fmt: skip
    with (tmp_path / "prometheus.log").open("w") as log:
        prometheus = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment())
    try:
        empty = list(QUERIES)

        def all_found() -> bool:
            empty[:] = [query for query in empty if not asked(ports[1], query)]
            return not empty

        def why() -> str:
            ended = prometheus.poll() is not None or exporter.poll() is not None
            return f"{empty}: {(tmp_path / 'prometheus.log').read_text()}" if ended else ""

        until("Prometheus finds data for every query", all_found, 60, why)
    finally:
        for process in (prometheus, exporter):
            process.terminate()
            process.wait(PATIENCE * 30)


def asked(port: int, query: str) -> list[Any]:
    """What Prometheus answers to a query; nothing where it does not answer yet."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []
