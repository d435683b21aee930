"""A batch through a running Label Studio, in a virtual environment of its own: `make test-label-studio` (minutes).

Its exports stand in tests/golden/label_studio, so that the quick tests read them too.
"""

import http.cookiejar
import json
import os
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import read_rows
from components.human_eval.batch.label_studio import instruction, labelling_config, tasks
from components.human_eval.returned_labels import Sample
from flows.deployment.local_servers import free_port
from tasks.prefect_flow.server import no_answer
from tests.waiting import until

pytestmark = pytest.mark.labelstudio
ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "label_studio"
ADMIN, PASSWORD = "admin@example.org", "long-enough-1"
STARTS_S = 105
"""The first start makes the database's tables, which takes minutes on a busy core."""


class Studio:
    """A user's session. A login is needed: tokens on the command line answer 401, since legacy tokens are off."""

    def __init__(self, url: str) -> None:
        self.url, self.cookies = url, http.cookiejar.CookieJar()
        self._open = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies)).open

    def form(self, path: str, **fields: str) -> None:
        """Send a form of its pages, as a browser does."""
        self._open(self.url + path).read()
        body = urllib.parse.urlencode(fields | {"csrfmiddlewaretoken": self._token()}).encode()
        self._open(urllib.request.Request(self.url + path, body, {"Referer": self.url + path})).read()

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """The answer of its API; an error's status is raised, since an error's JSON has an `id` too."""
        headers = {"Content-Type": "application/json", "X-CSRFToken": self._token(), "Referer": self.url + "/"}
        data = None if body is None else json.dumps(body).encode()
        return bytes(self._open(urllib.request.Request(self.url + path, data, headers, method=method)).read())

    def _token(self) -> str:
        return next((each.value or "" for each in self.cookies if each.name == "csrftoken"), "")


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Label Studio that sends nothing anywhere."""
    program = subprocess.run(["sh", "infra/label-studio.sh"], cwd=ROOT, check=True, capture_output=True, text=True)
    folder, port = tmp_path_factory.mktemp("studio"), free_port(18_080)
    quiet = {"COLLECT_ANALYTICS": "False", "SENTRY_DSN": "", "FRONTEND_SENTRY_DSN": "", "LATEST_VERSION_CHECK": "False"}
    environment = {**os.environ, **quiet, "LABEL_STUDIO_BASE_DATA_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [
        str((ROOT / program.stdout.strip()).absolute()), "start", "--no-browser", "--port", str(port),
        "--internal-host", "127.0.0.1", "--username", ADMIN, "--password", PASSWORD,
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until("Label Studio answers", lambda: no_answer(f"{url}/health") is None, STARTS_S, failed=lambda: (
            (folder / "log").read_text(errors="replace")[-2000:] if running.poll() is not None else None
        ))  # fmt: skip
        yield url
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()


def test_three_annotators_votes_come_back_from_every_export(studio: str, tmp_path: Path) -> None:
    sample = Sample.open(GOLDEN / "sample")
    ratings, rows = sample.about["ratings"], read_rows(GOLDEN / "sample" / "sheet.jsonl")
    admin = Studio(studio)
    admin.form("/user/login/", email=ADMIN, password=PASSWORD)
    config = labelling_config(ratings, sample.about["criteria"])
    asked = {"title": "Tether batch", "label_config": config, "show_instruction": True, "maximum_annotations": 3}
    project = json.loads(
        admin.call("POST", "/api/projects/", asked | {"expert_instruction": instruction(sample.about["guidelines"])})
    )["id"]
    admin.call("POST", f"/api/projects/{project}/import", tasks(rows))
    invited = json.loads(admin.call("GET", "/api/invite"))["invite_url"]
    people = [admin, Studio(studio), Studio(studio)]
    for n, person in enumerate(people[1:], 1):
        email = f"rater{n}@example.org"
        person.form(invited, email=email, password=PASSWORD, allow_newsletters="off", how_find_us="other")
    listed = json.loads(admin.call("GET", f"/api/tasks?project={project}&fields=all&page_size=100"))["tasks"]
    given: dict[str, tuple[str, ...]] = {}
    for t, task in enumerate(sorted(listed, key=lambda each: each["id"])):
        assert task["data"] == tasks(rows)[t]["data"], "byte for byte"
        votes = tuple(ratings[(3 * t + u * (t + 1)) % 4] for u in range(3))
        given[task["data"]["item"].split("-")[0]] = votes
        for person, vote in zip(people, votes, strict=True):
            result: list[dict[str, Any]] = [_chosen("rating", vote), _chosen("flags", "false", "broken")]
            person.call("POST", f"/api/tasks/{task['id']}/annotations/", {"result": result, "lead_time": 3.5})
    file = tmp_path / "export.json"
    file.write_bytes(admin.call("GET", f"/api/projects/{project}/export?exportType=JSON"))
    found = sample.answers(file)
    assert found.ratings | found.attention == given


def _chosen(name: str, *values: str) -> dict[str, Any]:
    return {"from_name": name, "to_name": "prompt", "type": "choices", "value": {"choices": list(values)}}
