"""What is declared for pools of GPUs: Prefect takes the job template, and several pods find each other."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values, find_placeholders

from components.distributed.hosts import HOST, HOSTS, RENDEZVOUS
from flows.deployment.register import _environment
from tests.services import ROOT

KUBERNETES = ROOT / "infra" / "kubernetes"
TEMPLATE = json.loads((KUBERNETES / "pool" / "gpu.json").read_text())


def manifest(**variables: Any) -> dict[str, Any]:
    """The job that Prefect would make, with the template's defaults under `variables`."""
    defaults = {n: each["default"] for n, each in TEMPLATE["variables"]["properties"].items() if "default" in each}
    given = {"name": "run", "command": "prefect flow-run execute", "env": {}, "labels": {}} | defaults | variables
    return apply_values(TEMPLATE["job_configuration"], given)["job_manifest"]


def test_prefect_takes_the_job_template_of_a_pool_of_gpus() -> None:
    pool = WorkPoolCreate(name="gpu", type="kubernetes", base_job_template=TEMPLATE)
    assert pool.base_job_template == TEMPLATE
    asked = {each.name for each in find_placeholders(TEMPLATE["job_configuration"])}
    assert asked == set(TEMPLATE["variables"]["properties"])


def test_a_pod_of_the_pool_asks_for_as_many_gpus_as_the_variable_says_and_is_tethers_client() -> None:
    pod = manifest(gpus=4, memory="256Gi")["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "256Gi", "nvidia.com/gpu": 4}
    assert container["command"] == ["with-secrets"] and container["args"] == "prefect flow-run execute"
    assert pod["metadata"]["labels"]["tether/client"] == "true"  # else no policy lets it reach the servers
    [worker] = yaml.safe_load_all((KUBERNETES / "overlays" / "gpu" / "worker-gpu.yaml").read_text())
    own = worker["spec"]["template"]["spec"]
    for name in ("securityContext", "tolerations", "enableServiceLinks", "automountServiceAccountToken"):
        assert pod["spec"][name] == own[name], name
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.items() >= {e["name"]: e["mountPath"] for e in own["containers"][0]["volumeMounts"]}.items()
    held = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert set(held) == set(mounts) and held["shared"]["emptyDir"]["medium"] == "Memory"
    assert (
        held["secrets"]["secret"]["items"]
        == next(v for v in own["volumes"] if v["name"] == "secrets")["secret"]["items"]
    )


def test_pods_of_several_hosts_meet_where_the_service_names_pod_0_and_count_as_the_job_does() -> None:
    job, service, policy = yaml.safe_load_all((KUBERNETES / "hosts" / "run.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]
    [container] = pod["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert int(variables[HOSTS]["value"]) == spec["completions"]
    assert "job-completion-index" in variables[HOST]["valueFrom"]["fieldRef"]["fieldPath"]
    name, port = variables[RENDEZVOUS]["value"].split(":")
    # Kubernetes calls a pod of an indexed job NAME-INDEX, and with a subdomain NAME-INDEX.SUBDOMAIN.
    assert name == f"{job['metadata']['name']}-0.{pod['spec']['subdomain']}"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] and service["spec"]["ports"][0]["port"] == int(port)
    for selector in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert selector.items() <= pod["metadata"]["labels"].items()
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(variables["RANKS"]["value"]) == gpus * spec["completions"]


def test_the_shell_of_the_pods_is_one_that_a_shell_takes_and_its_commands_are_there() -> None:
    import subprocess

    job = next(yaml.safe_load_all((KUBERNETES / "hosts" / "run.yaml").read_text()))
    [script] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    [module] = re.findall(r"python -m (\S+)", script)
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
    assert shlex.split(script.splitlines()[0])[:2] == ["if", "["] and "exec tether run gpu" in script


def test_a_deployment_holds_no_address_of_a_vllm_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has its own."""
    monkeypatch.setenv("TETHER_VLLM_URL", "http://10.0.0.9:8000")
    monkeypatch.setenv("VLLM_API_KEY", "of the one who deploys")
    assert not {"TETHER_VLLM_URL", "VLLM_API_KEY"} & _environment(tmp_path).keys()
