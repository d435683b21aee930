"""MLflow's own pages, in a browser: from a registered policy to its run, the models that went in, and its data."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.deployment.local_servers import free_port
from tasks.prefect_flow.server import no_answer
from tests.browser.conftest import WAIT
from tests.champions import make_champion
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]

MODE = "workflowType=machine_learning"


@pytest.fixture(scope="module")
def home(tether: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After a tiny run with a waived gate, and one that asks only PPO for something else: the rest is cached."""
    home = tmp_path_factory.mktemp("pages") / "home"
    for version, changes in enumerate((
        ("--set", "gates.policy.kl=-1", "--waive", "policy.kl", "--because", "to see the page"),
        ("--set", "ppo.clip_range=0.1"),
    ), start=1):  # fmt: skip
        done = tether("run", "tiny", *changes, home=home)
        assert done.returncode == 0, done.stdout + done.stderr
        make_champion(home, str(version))
    return home


@pytest.fixture(scope="module")
def runs(home: Path) -> list[str]:
    """Ids of the two, which sort by time."""
    return sorted(path.name for path in (home / "runs").iterdir())


@pytest.fixture(scope="module")
def server(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server over the home's database; ended by its own process id."""
    port = free_port(0)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}",
               "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--artifacts-destination", str(home / "mlartifacts")]  # fmt: skip
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    address = f"http://127.0.0.1:{port}"
    with (tmp_path_factory.mktemp("server") / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        until("MLflow answers", lambda: no_answer(f"{address}/health") is None, failed=process.poll)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # its group: it has a child for each worker
        process.wait(timeout=PATIENCE * 60)


def shows(page: Any, text: str | re.Pattern[str]) -> None:
    """See that the page comes to have a text where a person sees it."""
    seen(page.get_by_text(text))


def seen(found: Any) -> None:
    """See that the first of what is looked for comes to be visible."""
    from playwright.sync_api import expect  # here: plain pytest, which leaves these tests out, must not need it

    expect(found.first).to_be_visible(timeout=WAIT)


def follow(page: Any, name: str | re.Pattern[str], address: str) -> None:
    """Click the link of MLflow's own that is called `name` and leads to an address with `address` in it."""
    link = page.locator(f"a[href*='{address}']:not([target])").filter(has_text=name).first
    link.wait_for(state="visible")
    link.click()
    page.wait_for_url(f"**{address}**")


def opened(page: Any, name: str, address: str) -> Any:
    """The tab that a link of our note opens."""
    link = page.locator(f"a[target='_blank'][href*='{address}']").filter(has_text=re.compile(f"^{name}$")).first
    link.wait_for(state="visible")
    with page.expect_popup() as popup:
        link.click()
    assert address in popup.value.url and MODE in popup.value.url
    return popup.value


def drawn(page: Any) -> None:
    """See that the page shows the picture of a lineage, whole."""
    image = page.locator("img[src*='get-artifact?path=lineage.svg']").first
    image.wait_for(state="visible")
    until("the picture is loaded", lambda: image.evaluate("each => each.complete && each.naturalWidth"), 30)
    natural, shown = image.evaluate("each => [each.naturalWidth, each.clientWidth]")
    assert 100 < natural == shown


def headed(page: Any, title: str) -> None:
    """See that a page comes to have a title."""
    seen(page.get_by_role("heading", name=title, exact=True))


def test_from_a_policy_to_its_run_its_input_models_and_its_data(
    server: str, runs: list[str], open_page: Callable[..., Any], picture: Callable[[Any, str], None]
) -> None:
    visit = open_page(f"{server}/#/models/tether-policy?{MODE}", width=1600)
    page = visit.page
    shows(page, "Policies, trained by PPO under a KL tether")
    shows(page, "champion")
    drawn(page)
    picture(page, "mlflow-1-registered-model")

    follow(page, "Version 2", "/models/tether-policy/versions/2")
    shows(page, re.compile("^Champion$"))
    shows(page, re.compile(rf"Human evaluation passed in run {runs[1]}: win rate 0\.\d+ .*n = 32, judges: simulated"))
    drawn(page)
    picture(page, "mlflow-2-version")

    # The policy's own model, by the link that MLflow makes; from there what went into it, by the links of our note.
    follow(page, "tether-policy", "/models/m-")
    shows(page, "Model versions")
    shows(page, re.compile(r"^data \(#?[0-9a-f]{32}\)"))
    picture(page, "mlflow-3-policy")
    for name in ("sft", "reward"):
        model = opened(page, name, "/models/m-")
        headed(model, f"tether-{name}")
        shows(model, "computed in run")
        picture(model, f"mlflow-4-{name}")

    # Its data: the stage that validated them, though it was a hit of this run's cache.
    data = opened(page, "data", "/runs/")
    headed(data, "validate")
    shows(data, "From the cache.")
    shows(data, "Kept out: 78 rows")
    picture(data, "mlflow-5-validate")

    # Its run: of PPO, computed by the second run. Inputs and output stand in a table, the data with its digest.
    follow(page, "ppo", "/runs/")
    headed(page, "ppo")
    for name in ("tether-sft", "tether-reward", "tether-policy"):
        seen(page.get_by_role("link", name=name))
    shows(page, re.compile(r"data \([0-9a-f]{32}\)"))
    picture(page, "mlflow-6-run")

    # The pipeline run above it.
    follow(page, re.compile(f"^{runs[1]}$"), "/runs/")
    headed(page, runs[1])
    shows(page, "Child runs")
    picture(page, "mlflow-7-pipeline-run")


def test_the_policy_before_says_when_it_was_champion_and_what_was_waived(
    server: str, runs: list[str], open_page: Callable[..., Any], picture: Callable[[Any, str], None]
) -> None:
    page = open_page(f"{server}/#/models/tether-policy/versions/1?{MODE}", width=1600).page
    shows(page, re.compile(r"Champion from .* until .*: by .*, version 2 was promoted"))
    shows(page, re.compile(f"was waived by .* in run {runs[0]}: to see the page"))
    picture(page, "mlflow-8-former-champion")
