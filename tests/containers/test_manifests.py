"""Containerfile, manifests, compose file and unit, judged by the programs that read them; each finds a mistake too."""

import copy
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.engine import TOOLS
from tests.services import ROOT

pytestmark = pytest.mark.containers
INFRA = ROOT / "infra"
VERSION = "1.37"
"""Of Kubernetes, whose schemas are those of its API server."""


@pytest.fixture(autouse=True, scope="module")
def _tools() -> None:
    if not TOOLS.is_dir():
        pytest.skip("`make test-containers` installs hadolint, kubectl and the schemas")


def program(name: str, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(TOOLS), **variables}
    found = str(TOOLS / "bin" / name) if (TOOLS / "bin" / name).exists() else name
    return subprocess.run([found, *words], capture_output=True, text=True, env=environment, cwd=ROOT)


def test_hadolint_has_nothing_against_the_containerfile_and_finds_an_unpinned_root(tmp_path: Path) -> None:
    said = program("hadolint", "--failure-threshold", "style", "infra/Containerfile")
    assert (said.returncode, said.stdout) == (0, "")
    text = (INFRA / "Containerfile").read_text()
    (tmp_path / "Containerfile").write_text(
        re.sub(r"USER 10001:10001\n", "USER root\n", text.replace('ENTRYPOINT ["tether"]', "ENTRYPOINT tether"))
    )
    worse = program("hadolint", str(tmp_path / "Containerfile"))
    assert worse.returncode == 1 and "DL3002" in worse.stdout and "DL3025" in worse.stdout


def render(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply --kustomize` would send."""
    done = program("kubectl", "kustomize", str(folder))
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def mistakes(objects: list[dict[str, Any]]) -> list[str]:
    """What is against the schemas of Kubernetes, unknown fields too."""
    sys.path.append(str(TOOLS))
    try:
        import kubernetes_validate
    finally:
        sys.path.remove(str(TOOLS))
    found = []
    for each in objects:
        try:
            kubernetes_validate.validate(each, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{each['kind']}/{each['metadata']['name']}: {error}")
    return found


@pytest.mark.parametrize("name", ["base", "overlays/gpu", "job", "hosts", "pool"])
def test_the_manifests_render_and_are_what_kubernetes_takes(name: str) -> None:
    objects = render(INFRA / "kubernetes" / name)
    assert mistakes(objects) == []
    kinds = [each["kind"] for each in objects]
    print(f"\n{name}: {len(objects)} objects, {', '.join(sorted(set(kinds)))}")
    assert kinds.count("Deployment") == {"base": 3, "overlays/gpu": 4, "job": 0, "hosts": 0, "pool": 1}[name]
    assert all(each["metadata"].get("namespace") == "tether" for each in objects if each["kind"] != "Namespace")
    # Every ConfigMap and claim that a pod names is there, or is the base's.
    made = {(each["kind"], each["metadata"]["name"]) for each in objects} | {("PersistentVolumeClaim", "home")}
    text = yaml.safe_dump(objects)
    assert {
        ("ConfigMap", found)
        for found in re.findall(r"configMap(?:Ref)?:\n(?:\s+defaultMode: \d+\n)?\s+name: (\S+)", text)
    } <= made
    assert {("PersistentVolumeClaim", found) for found in re.findall(r"claimName: (\S+)", text)} <= made
    images = {
        container["image"]
        for each in objects
        if "template" in each.get("spec", {})
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert images <= {
        "tether:cpu", "tether:cuda", "docker.io/library/postgres:15-bookworm",
        f"docker.io/prefecthq/prefect:{importlib.metadata.version('prefect')}-python3.11-kubernetes",
    }  # fmt: skip


def test_the_job_that_a_pool_makes_is_one_that_kubernetes_takes() -> None:
    from prefect.utilities.templating import apply_values

    template = json.loads((INFRA / "kubernetes" / "pool" / "gpu.json").read_text())
    defaults = {n: each["default"] for n, each in template["variables"]["properties"].items() if "default" in each}
    # As prefect-kubernetes fills them in: a list of words, and of names and values.
    given = defaults | {"name": "run", "command": ["prefect", "flow-run", "execute"], "labels": {"a": "b"}, "gpus": 2}
    given["env"] = [{"name": "TETHER_HOME", "value": "/var/lib/tether"}]
    job = apply_values(template["job_configuration"], given)["job_manifest"]
    assert mistakes([job | {"metadata": job["metadata"] | {"name": "run"}}]) == []


def test_a_manifest_with_a_wrong_type_or_an_unknown_field_is_found() -> None:
    objects = render(INFRA / "kubernetes" / "overlays" / "gpu")
    [worker] = [each for each in objects if each["metadata"]["name"] == "worker-gpu"]

    def broken(change: Any) -> list[str]:
        one = copy.deepcopy(worker)
        change(one["spec"], one["spec"]["template"]["spec"], one["spec"]["template"]["spec"]["containers"][0])
        return mistakes([one])

    assert broken(lambda spec, pod, container: None) == []
    assert "'one'" in broken(lambda spec, pod, container: spec.update(replicas="one"))[0]
    assert (
        "readOnlyRootFileSystem"
        in broken(lambda spec, pod, container: container["securityContext"].update(readOnlyRootFileSystem=True))[0]
    )
    assert "terminationGracePeriod" in broken(lambda spec, pod, container: pod.update(terminationGracePeriod=60))[0]
    assert broken(lambda spec, pod, container: spec.pop("selector")) != []


def test_a_kustomization_that_names_a_file_that_is_not_there_is_found(tmp_path: Path) -> None:
    shutil.copytree(INFRA / "kubernetes", tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "base" / "mlflow-auth.ini").unlink()
    assert program("kubectl", "kustomize", str(tmp_path / "kubernetes" / "overlays" / "gpu")).returncode != 0


def test_the_overlay_of_the_documentation_changes_what_it_says(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/operations/containers.md").read_text(), re.DOTALL)
    shutil.copytree(INFRA / "kubernetes", tmp_path / "kubernetes")
    own = tmp_path / "kubernetes" / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(text)
    objects = render(own)
    assert mistakes(objects) == []
    found = {(each["kind"], re.sub(r"-[a-z0-9]{10}$", "", each["metadata"]["name"])): each for each in objects}
    assert found["PersistentVolumeClaim", "home"]["spec"]["storageClassName"] == "shared-files"
    [worker] = found["Deployment", "worker-cpu"]["spec"]["template"]["spec"]["containers"]
    assert worker["image"] == "registry.example/tether:2026-11"
    addresses = found["ConfigMap", "addresses"]["data"]
    assert addresses["PREFECT_UI_URL"] == "https://prefect.example" and addresses["MLFLOW_NAME"] == "localhost:5000"


def test_compose_reads_its_file_and_every_secret_and_volume_that_a_service_names_is_there() -> None:
    said = program(
        "podman-compose", "--file", "infra/compose.yaml", "--profile", "gpu", "config", TETHER_SECRETS="/secrets"
    )
    assert said.returncode == 0, said.stderr
    read = yaml.safe_load(said.stdout)
    assert {"postgres", "s3", "prefect", "mlflow", "prepare", "tls", "worker-cpu", "worker-gpu"} <= set(
        read["services"]
    )
    assert read["secrets"]["postgres"]["file"] == "/secrets/postgres"
    for name, service in read["services"].items():
        secrets = {each["source"] if isinstance(each, dict) else each for each in service.get("secrets", ())}
        assert secrets <= set(read["secrets"]), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source != "/var/backups/tether":  # which the operator makes
                assert source in read["volumes"] or (INFRA / source).exists(), (name, volume)
        assert set(service.get("depends_on", ())) <= set(read["services"]), name


def units(folder: Path) -> list[str]:
    """The units with this environment's interpreter, so that what they start is there; gives their files."""
    for path in (INFRA / "systemd").glob("*.service"):
        text = path.read_text().replace("/opt/tether/.venv", str(Path(sys.prefix)))
        (folder / path.name.replace("@", "@cpu")).write_text(text)
    return [str(path) for path in sorted(folder.glob("*.service"))]


def test_systemd_takes_the_unit_and_calls_it_safe(tmp_path: Path) -> None:
    files = units(tmp_path)
    assert len(files) == 1
    said = program("systemd-analyze", "verify", "--man=no", *files)
    assert (said.returncode, said.stderr) == (0, "")
    for file in files:  # from 0, safe, to 10
        judged = program("systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", file)
        print(judged.stdout.strip().splitlines()[-1])
        assert judged.returncode == 0, judged.stdout


def test_systemd_finds_an_unknown_setting_and_a_program_that_is_not_there(tmp_path: Path) -> None:
    file = next(each for each in units(tmp_path) if "worker" in each)
    text = Path(file).read_text()
    Path(file).write_text(text.replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    assert "NoNewPrivilege" in program("systemd-analyze", "verify", "--man=no", file).stderr
    Path(file).write_text(text.replace("bin/tether serve", "bin/teether serve"))
    assert "teether" in program("systemd-analyze", "verify", "--man=no", file).stderr
    Path(file).write_text(re.sub(r"^(NoNew|Protect|Restrict|Capability|SystemCall).*\n", "", text, flags=re.MULTILINE))
    assert program("systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", file).returncode != 0
