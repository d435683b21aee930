"""The user's mistakes: exit code 2, one paragraph, no stack trace, nothing left behind."""

import gzip
import json
from pathlib import Path

import pytest

from components.base.errors import Mistakes, UserError
from flows.cli.command import _paragraph

ROWS = [{"prompt": f"question {i}", "chosen": f"a good answer {i}", "rejected": f"a bad one {i}"} for i in range(120)]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one_paragraph(done) -> str:
    """Stderr of a run that ended as a user's mistake must."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "tiny", "--set", "ppo.clip_rnage=0.1"], "did you mean ppo.clip_range?"),
        (["run", "tiny", "--set", "ppo.clip_range=-0.2"], "ppo.clip_range = -0.2: must be greater than 0"),
        (["run", "tiny", "--set", "data.preferences=nowhere.jsonl"], "nowhere.jsonl"),
        (["run", "tiny", "--set", "sft.base=nowhere"], "sft.base = nowhere"),
        (["run", "tiny", "--set", "sft.base=smollm2"], "tether fetch smollm2"),
        (["run", "tiny", "--waive", "ppo.kll", "--because", "x"], "did you mean policy.kl?"),
        (["run", "tiny", "--waive", "policy.kl"], "--because"),
        (["run", "tinny"], "Did you mean tiny?"),
        (["metrics"], "`tether metrics` is gone. MLflow has each run's metrics"),
        (["run", "absent.yaml"], "absent.yaml"),
        (["run", "tiny", "--tag", "=1"], "--tag '=1': a tag is KEY=VALUE or KEY"),
        (["rerun", "ppo", "--name", ""], "--name: the name is empty"),
        (["rerun", "ppo"], "no run"),
        (["status", "20200101-000000-aaaa"], "20200101-000000-aaaa"),
        (["status", "--json"], "no run"),
        (["people", "score", "sheet.csv"], "no run"),
        (["people", "tasks", "RUN", "tasks.csv"], "tasks.csv: Label Studio's tasks are JSON. Name a file that ends"),
        (["data", "check", "a.jsonl", "--draft-suite", "s.json", "--json", "--out", "d"], "leave out --out, --json."),
        (["fetch", "gpt5"], "smollm2"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(
    tether_here, tmp_path: Path, arguments: list[str], said: str
) -> None:
    home = tmp_path / "home"
    assert said in one_paragraph(tether_here(*arguments, home=home))
    assert not home.exists()


def test_a_profile_with_a_negative_clip_range_is_refused(tether, tmp_path: Path) -> None:
    """In a process of its own, as a shell starts it."""
    (tmp_path / "mine.yaml").write_text("extends: tiny\nppo: {clip_range: -0.2}\n")
    done = tether("run", "mine.yaml", home=tmp_path / "home", embedded=True)  # it is refused before it needs a server
    assert "mine.yaml: ppo.clip_range = -0.2: must be greater than 0." in one_paragraph(done)
    assert not (tmp_path / "home").exists()


def lacking_rejected(path: Path) -> None:
    write(path, [{k: v for k, v in row.items() if k != "rejected"} for row in ROWS])


def truncated(path: Path) -> None:
    """A gzip whose first 1,000 rows are whole: only its end shows that it is cut."""
    whole = gzip.compress(write(path.with_name("rows.jsonl"), ROWS * 20).read_bytes())
    path.write_bytes(whole[:-20])


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("lacks.jsonl", lacking_rejected, "lacks.jsonl: every pair lacks `rejected`"),
        ("empty.jsonl", Path.touch, "empty.jsonl is empty"),
        ("short.jsonl.gz", truncated, "short.jsonl.gz breaks off after row 2"),
    ],
)
def test_a_spoilt_data_file_is_refused_before_anything_is_written(
    tether_here, tmp_path: Path, name, spoil, said
) -> None:
    spoil(tmp_path / name)
    done = tether_here("run", "tiny", "--set", f"data.preferences={name}", home=tmp_path / "home")
    assert said in one_paragraph(done)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [("", "runners.ppo = gpu: a work pool needs a Prefect server"), ("http://127.0.0.1:9/api", "no Prefect server")],
)
def test_a_run_that_needs_a_server_and_has_none_leaves_no_run(tether, tmp_path: Path, url: str, said: str) -> None:
    home = tmp_path / "home"
    done = tether("run", "tiny", "--set", "runners.ppo=gpu", home=home, embedded=True, PREFECT_API_URL=url)
    assert said in one_paragraph(done)
    assert not list((home / "runs").iterdir())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all: only the first start of Prefect and MLflow in it is slow."""
    return tmp_path_factory.mktemp("errors") / "home"


@pytest.mark.whole
def test_a_mistake_that_only_the_stage_can_see_stores_nothing(tether, home: Path) -> None:
    write(home.parent / "one.jsonl", ROWS[:1])
    done = tether("run", "tiny", "--set", "data.preferences=one.jsonl", home=home)
    said = one_paragraph(done)
    assert "the responses agree in their first" in said and "Raise generation.max_new_tokens" in said
    for name in ("objects", "records"):
        folder = home / "store" / name
        assert not folder.exists() or not list(folder.iterdir())
    shown = json.loads(tether("status", "--json", home=home).stdout)
    assert shown["state"] == "failed"
    assert [stage["state"] for stage in shown["stages"]] == ["failed", *["not_run"] * 4]


@pytest.mark.whole
def test_one_bad_row_among_good_ones_is_quarantined_with_its_number_and_the_gate_decides(tether, home: Path) -> None:
    bad = {"prompt": ROWS[7]["prompt"], "chosen": ROWS[7]["chosen"]}
    write(home.parent / "onebad.jsonl", [*ROWS[:7], bad, *ROWS[8:]])
    pairs = f"gates.validate.pairs={len(ROWS)}"
    done = tether("run", "tiny", "--set", "data.preferences=onebad.jsonl", "--set", pairs, home=home)
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"validate.pairs: data/pairs is {len(ROWS) - 1}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    stage = json.loads(tether("status", "--json", home=home).stdout)["stages"][0]
    assert stage["metrics"]["data/quarantined"] == 1
    quarantine = (home / "store" / "views" / stage["digest"] / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in quarantine] == [8]


def test_a_list_of_mistakes_stays_a_list_on_the_terminal_and_any_other_message_is_one_paragraph() -> None:
    """Defect 11: all mistakes of a sheet in one paragraph can't be read."""
    assert _paragraph(Mistakes("row 2:  a", "row 3: c")) == "2 mistakes:\n  row 2: a\n  row 3: c"
    assert _paragraph(UserError("a\n  b")) == "a b"
