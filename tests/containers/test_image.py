"""The image, built and run without an engine: as user 10001, with a read-only root, against compose.yaml's servers.

Building takes minutes; TETHER_IMAGES=FOLDER keeps the images and takes those that are there.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.containers.engine import IMAGE, UID, Engine
from tests.services import Services, new_services
from tests.waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]
HOME = "/var/lib/tether"


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """All but a worker."""
    with new_services() as services:
        services.up("s3", "prefect", "prepare", "tls")
        until("Caddy has made its authority", services.authority.exists, 60)
        yield services


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared home, as an operator makes it."""
    folder = tmp_path_factory.mktemp("home")
    os.chown(folder, UID, UID)
    return folder


class Client:
    """Containers that have what another machine needs."""

    def __init__(self, containers: Engine, services: Services, home: Path) -> None:
        self.containers, self._passwords = containers, services.passwords()
        bundle = services.authority
        self.environment = {**services.client(), "TETHER_HOME": HOME}
        self.options = ("--volume", f"{home}:{HOME}", "--volume", f"{bundle}:{bundle}:ro")

    def check(self, said: str) -> str:
        """What a container has printed; no password is in it."""
        assert not any(password in said.encode() for password in self._passwords)
        return said

    def __call__(self, *words: str) -> tuple[int, str]:
        began = time.monotonic()
        done = self.containers.run(IMAGE, *words, options=self.options, environment=self.environment)
        print(f"{time.monotonic() - began:6.1f} s  tether {' '.join(words[:2])}, in a container")
        return done.returncode, self.check(done.stdout + done.stderr)

    @contextmanager
    def detached(self, name: str, *words: str) -> Iterator["Box"]:
        """A container that runs beside this process, and is gone after."""
        options = ("--detach", "--name", name, *self.options)
        done = self.containers.run(IMAGE, *words, options=options, environment=self.environment)
        assert done.returncode == 0, done.stderr
        try:
            yield Box(self, name)
        finally:
            self.containers.podman("rm", "--force", name)


class Box:
    """A container by its name."""

    def __init__(self, client: Client, name: str) -> None:
        self._podman, self._name, self._check = client.containers.podman, name, client.check

    def log(self) -> str:
        """What it has printed."""
        time.sleep(1)
        done = self._podman("logs", self._name)
        return self._check(done.stdout + done.stderr)

    def stop(self) -> int:
        """End it as an orchestrator does: SIGTERM, and SIGKILL after 60 s. Returns its code."""
        began = time.monotonic()
        self._podman("stop", "--time", "60", self._name)
        print(f"{time.monotonic() - began:6.1f} s  {self._name} has ended")
        return self._code()

    def kill(self) -> int:
        """End it as a machine that is lost does. Returns its code."""
        self._podman("kill", self._name)
        self._podman("wait", self._name)
        return self._code()

    def _code(self) -> int:
        [found] = json.loads(self._podman("inspect", self._name).stdout)
        code: int = found["State"]["ExitCode"]
        return code


@pytest.fixture(scope="module")
def client(containers: Engine, services: Services, home: Path) -> Client:
    return Client(containers, services, home)


def test_the_image_has_what_runs_need_and_nothing_of_the_tests(containers: Engine) -> None:
    [found] = json.loads(containers.podman("image", "inspect", IMAGE).stdout)
    print(f"\n{found['Size'] / 1e9:.2f} GB")
    assert found["User"] == f"{UID}:{UID}" and found["Config"]["Entrypoint"] == ["tether"]
    assert found["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert found["Size"] < 2.6e9, "something large came in"
    look = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    done = containers.run(
        IMAGE, "-c", look, "pytest", "moto", "playwright", "mypy", "psycopg", "flask_wtf", "s3fs", "tests",
        options=("--entrypoint", "python"),
    )  # fmt: skip
    assert done.stdout.split() == ["['psycopg',", "'flask_wtf',", "'s3fs']"], done.stderr


def test_a_container_is_nobody_special_and_writes_to_its_home_and_tmp_alone(containers: Engine, home: Path) -> None:
    script = (
        "id -u; id -un; for d in / /etc /opt/tether/bin /opt/tether/lib /usr /var /root /tmp /var/lib/tether; do"
        " (echo x > $d/probe) 2>/dev/null && echo wrote $d; done; grep -E 'NoNewPrivs|CapEff' /proc/self/status"
    )
    options = ("--entrypoint", "sh", "--volume", f"{home}:{HOME}")
    said = containers.run(IMAGE, "-c", script, options=options).stdout.split()
    assert said == [str(UID), "tether", "wrote", "/tmp", "wrote", HOME, "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    (home / "probe").unlink()


def test_a_wrong_command_is_a_mistake_of_the_user_in_a_container_too(containers: Engine) -> None:
    done = containers.run(IMAGE, "run", "no-such-profile")
    assert done.returncode == 2 and "no-such-profile" in done.stderr and "Traceback" not in done.stderr


def test_doctor_finds_the_servers_in_order(client: Client) -> None:
    code, said = client("doctor")
    assert code == 0, said


def test_a_run_in_a_container_keeps_its_results_and_facts_on_the_servers(
    client: Client, services: Services, home: Path
) -> None:
    code, said = client("run", "tiny", "--name", "boxed")
    assert code == 0, said
    code, said = client("status", "--json")
    status = json.loads(said)
    assert status["state"] == "passed" and [each["state"] for each in status["stages"]] == ["passed"] * 5
    code, said = client("sync")  # what a busy MLflow did not take in time
    assert code == 0, said
    assert {path.stat().st_uid for path in home.rglob("*")} == {UID}
    listed = services.run("tether", "store", "ls", "--json")  # of another home: all of it is in the bucket
    assert listed.returncode == 0 and "human_eval" in listed.stdout, listed.stderr


def test_a_run_that_another_container_computed_is_found_in_the_store(client: Client) -> None:
    code, said = client("run", "tiny", "--name", "again")
    assert code == 0, said
    code, said = client("status", "--json")
    assert [each["cached"] for each in json.loads(said)["stages"]] == [True] * 5


def test_a_worker_in_a_container_takes_a_deployed_run_and_ends_in_order_when_it_is_stopped(
    client: Client, services: Services
) -> None:
    """The command of compose.yaml, the manifests and the unit."""
    code, said = client("deploy", "tiny", "--set", "runners.ppo=local", "--set", "seed=5")
    assert code == 0, said
    with client.detached("worker", "serve", "--pool", "cpu", "--limit", "2") as worker:
        words = ("with-secrets", "prefect", "deployment", "run", "rlhf/tiny", "--watch")
        ordered = services.run("worker-cpu", *words, inside=True)
        assert ordered.returncode == 0, ordered.stdout + ordered.stderr
        assert worker.stop() == 0, worker.log()
        assert "worker-cpu: takes runs of pool cpu, 2 at a time" in worker.log()
        assert "Finished in state Completed()" in worker.log()


def test_a_run_whose_container_is_stopped_or_killed_goes_on_from_its_checkpoint_in_the_next_one(client: Client) -> None:
    """The next container has another host's name and other processes: a dead holder is told by its heartbeat alone."""
    words = ("run", "tiny", "--set", "seed=11", "--set", "ppo.updates=150")
    with client.detached("stopped", *words) as box:
        until("it is in PPO", lambda: re.search(r"\n  ppo [1-9]\d*/150", box.log()), 900)
        assert box.stop() == 143, box.log()
    with client.detached("killed", *words) as box:
        until("it has gone on", lambda: "ppo: resuming at step" in box.log(), 900)
        assert box.kill() == 137, box.log()
    code, said = client(*words)
    assert code == 0 and "ppo: resuming at step" in said, said
