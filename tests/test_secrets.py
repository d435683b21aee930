"""Secrets in every variable, URL and option that take one: nothing that is printed or written holds them."""

import json
from pathlib import Path

import pytest

from tests.conftest import Tether

SECRET = "geheim-4711-correct-horse"


def holders(*folders: Path) -> list[str]:
    """Files that hold the secret."""
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


def secretive(prefect: str) -> dict[str, str]:
    """The environment of a machine whose every service asks for a password; no MLflow answers there."""
    return {
        "PREFECT_API_URL": prefect.replace("://", f"://me:{SECRET}@"),
        "PREFECT_API_KEY": SECRET,
        "MLFLOW_TRACKING_URI": f"http://me:{SECRET}@127.0.0.1:9",
        "MLFLOW_TRACKING_PASSWORD": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "HF_TOKEN": SECRET,
    }


@pytest.mark.whole
def test_a_run_and_what_is_asked_of_it_later_say_and_store_no_secret(
    tether: Tether, prefect: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home, variables = tmp_path / "home", secretive(prefect["PREFECT_API_URL"])
    calls = (
        "run tiny", "status", "status --json", "status --why", "runs", "status --html", "sync", "doctor",
        "store gc", "lineage ppo", "deploy tiny", "promote x-policy/1", "card x/1",
    )  # fmt: skip
    said = {call: tether(*call.split(), home=home, **variables) for call in calls}
    assert {call: said[call].returncode for call in ("run tiny", "status", "runs", "deploy tiny")} == dict.fromkeys(
        ("run tiny", "status", "runs", "deploy tiny"), 0
    ), said
    # The second run, all hits, says in JSON that MLflow is away.
    said["run tiny as JSON"] = logged = tether("run", "tiny", home=home, TETHER_LOG_FORMAT="json", **variables)
    lines = [json.loads(line) for line in logged.stderr.splitlines()]
    assert {line["stage"] for line in lines} >= {"validate", "sft", "reward", "ppo", "human_eval"}
    assert len({line["run"] for line in lines if line["stage"]}) == 1 and "report: " in logged.stdout
    assert [call for call, done in said.items() if SECRET in done.stdout + done.stderr] == []
    assert "127.0.0.1:9" in said["doctor"].stdout + said["doctor"].stderr, "the rest of the address is shown"
    assert holders(home, *tmp_path_factory.getbasetemp().glob("prefect*")) == []


@pytest.mark.parametrize(
    "call",
    [
        ["run", "tiny", "--set", f"data.preferences=https://me:{SECRET}@host/pairs.jsonl"],
        ["run", "tiny", "--set", f"sft.base=s3://bucket/x?token={SECRET}"],
        ["run", "tiny", "--set", f"mlflow.experiment={SECRET}"],
        ["run", "tiny", "--tag", f"from=http://me:{SECRET}@host"],
        ["run", "tiny", "--name", SECRET],
        ["run", "tiny", "--waive", "policy.kl", "--because", f"http://me:{SECRET}@host"],
        ["run", f"http://me:{SECRET}@host/profile.yaml"],
        ["data", "check", f"http://me:{SECRET}@host/pairs.jsonl"],
    ],
    ids=lambda call: " ".join(call[:-1]),
)
def test_a_secret_in_an_option_is_refused_and_not_repeated(
    tether_here: Tether, tmp_path: Path, call: list[str]
) -> None:
    done = tether_here(*call, home=tmp_path / "home", **secretive("http://127.0.0.1:9/api"))
    assert done.returncode == 2 and SECRET not in done.stdout + done.stderr, done
    assert holders(tmp_path) == []


@pytest.mark.parametrize(
    ("variable", "scheme"),
    [("TETHER_STORE", "s3"), ("TETHER_STORE", "nonsense"), ("MLFLOW_TRACKING_URI", "postgresql")],
)
@pytest.mark.whole
def test_a_url_with_a_password_that_leads_nowhere_is_said_without_it(
    tether: Tether, tmp_path: Path, variable: str, scheme: str
) -> None:
    url = f"{scheme}://me:{SECRET}@127.0.0.1:9/x?password={SECRET}"
    for call in (["doctor"], ["store", "gc"], ["run", "tiny"] if variable == "TETHER_STORE" else ["sync"]):
        done = tether(*call, home=tmp_path / "home", **{variable: url})
        assert SECRET not in done.stdout + done.stderr, done
    assert holders(tmp_path) == []
