"""The deployment's form on a real Prefect server: short, what matters first, and what is wrong is refused there."""

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import Tether
from tests.servers import PrefectServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    server = PrefectServer(tmp_path_factory.mktemp("prefect")).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def form(server: PrefectServer, tether: Tether, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The form's address."""
    done = tether("deploy", "demo", home=tmp_path_factory.mktemp("form") / "home", PREFECT_API_URL=server.api)
    assert done.returncode == 0, done
    id_ = get(f"{server.api}/deployments/name/rlhf/demo")["id"]
    return f"{server.api.removesuffix('/api')}/deployments/deployment/{id_}/run"


def field(page: Any, name: str) -> Any:
    """One parameter of the form."""
    label = page.get_by_text(f"{name} (Optional)", exact=True)
    return page.locator(".schema-form-property").filter(has=label).last


@pytest.mark.parametrize("width", [1280, 390])
def test_the_form_begins_with_what_people_change_and_is_folded(
    form: str, open_page: Callable[..., Any], picture: Callable[..., None], overflow: Callable[..., int], width: int
) -> None:
    """It was 30,000 pixels high, with `from_stage` at its end."""
    page = open_page(form, width).page
    field(page, "project").wait_for()
    height = page.evaluate("Math.max(...[...document.querySelectorAll('*')].map(each => each.scrollHeight))")
    page.set_viewport_size({"width": width, "height": height})  # it scrolls inside
    picture(page, f"form-{width}")
    assert height < 5500 and field(page, "from_stage").bounding_box()["y"] < 500
    assert overflow(page) == 0
    page.get_by_text("Compute from this stage on.").wait_for()  # each field says what it is


def test_a_wrong_value_is_refused_on_the_page_and_a_waiver_and_a_change_reach_the_run(
    form: str, server: PrefectServer, open_page: Callable[..., Any], picture: Callable[..., None]
) -> None:
    page = open_page(form).page
    field(page, "waive").wait_for()
    for name, text in (("name", "first"), ("note", "new data"), ("because", "a trial"), ("waived_by", "Ada")):
        field(page, name).locator("textarea").fill(text)
    field(page, "waive").locator(".p-select-button__icon").click()
    page.get_by_placeholder("Search").fill("policy.kl")
    page.get_by_text("policy.kl", exact=True).last.click()
    page.keyboard.press("Escape")
    field(page, "ppo").locator("textarea").fill('{"clip_range": -1}')
    page.get_by_role("button", name="Submit").click()
    page.get_by_text(re.compile("-1 is less than or equal to the minimum of 0")).first.wait_for()
    field(page, "ppo").scroll_into_view_if_needed()
    picture(page, "form-refused")
    field(page, "ppo").locator("textarea").fill('{"updates": 7}')
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("runs/flow-run/|deployments/deployment/[0-9a-f-]+(\\?.*)?$"))
    run = newest(server.api, form)["parameters"]
    assert (run["waive"], run["because"], run["waived_by"]) == (["policy.kl"], "a trial", "Ada")
    assert (run["name"], run["note"], run["changes"]["ppo"]) == ("first", "new data", {"updates": 7})
    assert run["config"]["ppo"]["updates"] > 7, "beside the deployed config, as it was"


def newest(api: str, form: str) -> dict[str, Any]:
    """The run that the form made."""
    wanted = {"sort": "EXPECTED_START_TIME_DESC", "deployments": {"id": {"any_": [form.split("/")[-2]]}}}
    asked = urllib.request.Request(
        f"{api}/flow_runs/filter", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)[0]
