"""Copies of the code with a fault planted: what a copy computes, and the command that runs in it and is interrupted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.catalogue import ROOT, read
from tests.planted.copies import PACKAGES, TASK, Tether, code_digest, copied, damage, plant

CLI = """
import json, os, pathlib, sys, time
run = pathlib.Path(os.environ["TETHER_HOME"]) / "runs" / sys.argv[1]
(run / "metrics").mkdir(parents=True)
(run / "run.json").write_text(json.dumps({"run": run.name, "started": sys.argv[1], "stages": []}))
try:
    for step in range(1, int(sys.argv[2]) + 1):
        with (run / "metrics" / "ppo.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\\n")
        time.sleep(0.1)
except KeyboardInterrupt:
    print(f"tether: interrupted after {step}")
    sys.exit(130)
print(os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"], "TETHER_STORE" in os.environ)
"""
"""Stands for the command: a run with the name and the number of updates that it is given."""


@pytest.fixture
def tether(tmp_path: Path) -> Tether:
    (tmp_path / "code" / "flows" / "cli").mkdir(parents=True)
    (tmp_path / "code" / "flows" / "cli" / "__main__.py").write_text(CLI)
    return Tether(tmp_path / "code", tmp_path / "home")


def test_a_command_runs_in_its_own_code_and_home_and_says_which_run_it_began(
    tether: Tether, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_STORE", "/elsewhere")
    ended = tether("a", "0")
    assert (ended.code, ended.run) == (0, "a") and ended.output == f"{tether.code} 1 False\n"
    assert tether("b", "0").run == "b" and tether.status()["run"] == "b" and tether.status("a")["run"] == "a"
    assert tether("b", "0").run == ""  # the folder is there already: it fails, and begins no run


def test_a_run_is_interrupted_after_the_update_and_an_earlier_runs_updates_do_not_count(tether: Tether) -> None:
    assert tether("a", "9").code == 0
    ended = tether("b", "100", interrupted_after=4)
    assert ended.code == 130 and ended.run == "b"
    assert 4 <= int(ended.output.split()[-1]) < 30


def test_a_run_that_ends_before_the_update_is_not_waited_for(tether: Tether) -> None:
    assert tether("a", "2", interrupted_after=9).code == 0


def test_a_copy_has_the_packages_and_a_fault_in_it_leaves_this_checkout(tmp_path: Path) -> None:
    before, code = code_digest(), copied(tmp_path)
    assert {path.name for path in code.iterdir()} == {*PACKAGES, "pyproject.toml"}
    fault = next(fault for fault in read() if fault.name == "no_whitening")
    plant(fault, code)
    ours, theirs = ((root / fault.file).read_text() for root in (ROOT, code))
    assert ours.replace(fault.before, fault.after) == theirs != ours
    assert code_digest() == before


def test_a_fault_in_data_changes_what_the_task_of_the_copy_writes(tmp_path: Path) -> None:
    code = copied(tmp_path)
    fault = next(fault for fault in read() if fault.name == "prompt_of_previous_row")
    script = (
        "from components.data.support_desk.desk import SupportDeskConfig, generate\n"
        "import json; print(json.dumps(generate(3, SupportDeskConfig(demonstrations=50, pairs=50))))"
    )

    def rows() -> list[list[dict[str, object]]]:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=code, env={"PYTHONPATH": str(code)}, capture_output=True, check=True)
        return json.loads(done.stdout)

    right, (demonstrations, pairs) = rows(), (plant(fault, code), rows())[1]
    assert demonstrations == right[0]
    assert [row["prompt"] for row in pairs] == [row["prompt"] for row in [right[1][-1], *right[1][:-1]]]
    assert [row["chosen"] for row in pairs] == [row["chosen"] for row in right[1]]
    assert (code / TASK / "planted_rows.py").exists() and not (ROOT / TASK / "planted_rows.py").exists()


def test_damage_flips_one_bit_of_a_stages_weights(tmp_path: Path) -> None:
    objects = tmp_path / "store" / "objects"
    objects.mkdir(parents=True)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    status = {"run": "a", "started": "1", "stages": [{"name": "sft", "digest": "d"}]}
    (tmp_path / "runs" / "a" / "run.json").write_text(json.dumps(status))
    (objects / "d").write_text(json.dumps({"model/config.json": "c", "model/model.safetensors": "w"}))
    (objects / "w").write_bytes(bytes(64))
    damage(tmp_path, "sft")
    after = (objects / "w").read_bytes()
    assert len(after) == 64 and sum(byte.bit_count() for byte in after) == 1
