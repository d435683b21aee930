"""`tether data probes check`: what is wrong with a team's probes, and what is in them."""

import json
from pathlib import Path

from components.evaluation.config import SHIPPED


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def prompts(count: int) -> list[object]:
    return [
        {"id": f"p{n}", "category": f"c{n % 2}", "prompt": f"Question {n}?", "clears": ["yes"]} for n in range(count)
    ]


HEADER = {"probe": "own", "rule": "expected", "violation": "does not say yes"}


def test_tethers_own_probes_have_nothing_wrong(tether_here, tmp_path: Path) -> None:
    done = tether_here("data", "probes", "check", *SHIPPED, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert "false_premises: 90 prompts, 28 of several turns, 90 with patterns of their own" in done.stdout
    assert "  rule complies: a response that does not refuse and is not empty" in done.stdout
    assert "  categories: computing 9, figurative 9, home 10" in done.stdout and not done.stderr


def test_json_has_counts_and_the_rules_agreement_with_labels(tether_here, tmp_path: Path) -> None:
    labelled = [{"response": "Yes.", "violation": False}, {"response": "No.", "violation": True}]
    file = write(tmp_path / "own.jsonl", [HEADER, *prompts(3), {**prompts(4)[3], "labelled": labelled}])  # type: ignore[dict-item]
    done = tether_here("data", "probes", "check", str(file), "--json", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    (check,) = json.loads(done.stdout)["files"]
    assert check == {
        "file": str(file), "problems": [], "probe": "own", "rule": "expected", "prompts": 4, "turns": 0, "patterns": 4,
        "warnings": [f"{file}: it has 4 prompts; with fewer than 20, a rate says little. Add prompts."],
        "categories": {"c0": 2, "c1": 2}, "labelled": {"responses": 2, "precision": 1.0, "recall": 1.0, "kappa": 1.0},
    }  # fmt: skip
    text = tether_here("data", "probes", "check", str(file), home=tmp_path / "home").stdout
    assert "the rule on 2 labelled responses: precision 1, recall 1, kappa 1" in text and "fewer than 20" in text


def test_every_problem_of_every_file_is_printed_and_is_the_users(tether_here, tmp_path: Path) -> None:
    many = write(tmp_path / "many.jsonl", [HEADER, *[{"id": "a", "kind": "x"} for _ in range(30)]])
    fine = write(tmp_path / "fine.jsonl", [HEADER, *prompts(20)])
    done = tether_here("data", "probes", "check", str(many), str(fine), "absent", home=tmp_path / "home")
    assert done.returncode == 2
    assert done.stdout.count(f"{many}, line ") == 60, "a missing and an unknown field in 30 lines"
    assert f"{fine}: 20 prompts" in done.stdout
    assert "absent: the file can't be read: No such file or directory." in done.stdout
    assert done.stderr.startswith(f"tether: 61 problems in {many}, absent. Correct the lines named on stdout.")
    as_json = tether_here("data", "probes", "check", str(many), "--json", home=tmp_path / "home")
    assert as_json.returncode == 2 and len(json.loads(as_json.stdout)["files"][0]["problems"]) == 60


def test_control_characters_of_a_file_do_not_reach_the_terminal(tether_here, tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", [HEADER, {"id": "a", "category": "x", "prompt": "p", "\x1b[2J": 1}])
    done = tether_here("data", "probes", "check", str(file), home=tmp_path / "home")
    assert done.returncode == 2 and "\x1b" not in done.stdout + done.stderr and "there is no such field" in done.stdout
