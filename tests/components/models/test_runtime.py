"""A stage's machine: which GPUs it finds, what of it a key holds, and what `activate` leaves behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components.base.errors import MachineMismatch
from components.models import runtime as module
from components.models.runtime import NONE, VECTOR_MATHS, WORKSPACE, Gpu, Gpus, Runtime, activate, usable_gpus

H100, A100, T4 = (Gpu("NVIDIA H100 80GB HBM3", (9, 0)), Gpu("NVIDIA A100-SXM4-40GB", (8, 0)), Gpu("Tesla T4", (7, 5)))


def machine(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, cuda: str = "13.0", instruction_set: str = "avx2") -> None:
    """A machine with these GPUs."""
    monkeypatch.setattr(module, "usable_gpus", lambda: Gpus(gpus, cuda, "as the test says"))
    monkeypatch.setattr(module, "cpu_instruction_set", lambda: instruction_set)


def test_the_driver_is_asked_only_if_torch_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_driver", lambda: ((H100,), "the driver shows 1 GPU"))
    for visible, cuda, gpus in (("0", "13.0", (H100,)), ("1", NONE, ())):
        module._driver_gpus.cache_clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(module, "torch_cuda", lambda cuda=cuda: cuda)
        assert usable_gpus().gpus == gpus
        assert Runtime().resolve().device == ("cuda" if gpus else "cpu")
    module._driver_gpus.cache_clear()


def test_torchs_cuda_version_is_read_as_torch_says_it() -> None:
    module.torch_cuda.cache_clear()
    assert module.torch_cuda() == (torch.version.cuda or NONE)


DRIVER = """
#include <cstring>
#include <cstdlib>
extern "C" int cuInit(unsigned) { return std::atoi(std::getenv("FAKE_ERROR")); }
extern "C" int cuDeviceGetCount(int *count) { *count = 2; return 0; }
extern "C" int cuDeviceGetName(char *name, int, int device) {
  std::strcpy(name, device ? "Tesla T4" : "NVIDIA H100 80GB HBM3"); return 0; }
extern "C" int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (device ? 7 : 9) : (device ? 5 : 0); return 0; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a driver with g++ (apt install g++)")
def test_the_driver_is_asked_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for libcuda.so.1 with the calls' own signatures."""
    (tmp_path / "driver.cpp").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", tmp_path / "driver.cpp", "-o", library], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FAKE_ERROR", "0")
    gpus, why = module.ask_driver()
    assert gpus == (H100, T4) and why == "CUDA's driver shows 2 GPUs"
    monkeypatch.setenv("FAKE_ERROR", "100")
    assert module.ask_driver() == ((), "CUDA's driver does not start (cuInit gives error 100)")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_driver_that_is_not_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ASK", "import ctypes; ctypes.CDLL('libcuda-is-not-here.so.1')")
    gpus, why = module.ask_driver()
    assert gpus == () and "libcuda-is-not-here.so.1" in why


def test_the_key_tells_one_gpu_from_another_cuda_from_cuda_and_one_rank_from_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()
    for gpus, cuda in (((H100,), "13.0"), ((A100,), "13.0"), ((H100,), "12.8"), ((H100,) * 8, "13.0")):
        machine(monkeypatch, *gpus, cuda=cuda)
        seen.add(Runtime().resolve().model_dump_json())
        seen.add(Runtime(tf32=True).resolve().model_dump_json())
        seen.add(Runtime(cuda_graphs=True).resolve().model_dump_json())
    assert len(seen) == 12


def test_auto_is_a_rank_for_each_gpu_and_one_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, H100, H100, H100)
    assert Runtime().resolve().ranks == 3
    assert Runtime(ranks=2).resolve().ranks == 2
    assert Runtime(device="cpu").resolve().ranks == 1
    assert Runtime(device="cpu", ranks=2).resolve().ranks == 2
    with pytest.raises(ValueError, match="ranks"):
        Runtime(ranks=0)
    for name, value in (("HOSTS", "3"), ("HOST", "0"), ("RENDEZVOUS", "first:29500")):
        monkeypatch.setenv(f"TETHER_{name}", value)
    of_all_hosts = Runtime().resolve()
    assert of_all_hosts.ranks == 9 and of_all_hosts.misfits() == []


def test_a_machine_that_does_not_fit_is_refused_before_torch_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, A100, A100)
    run = Runtime(threads=1).resolve()
    for gpus, says in (((H100,) * 2, r"gpu is NVIDIA A100-SXM4-40GB \(8.0\), and here it is NVIDIA H100"),
                       ((A100,), r"runtime\.ranks is 2, and here it is 1\.")):  # fmt: skip
        machine(monkeypatch, *gpus)
        with pytest.raises(MachineMismatch, match=says):
            activate(run)


def test_a_gpu_without_fast_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, T4)
    assert Runtime().resolve().dtype == "float32"
    machine(monkeypatch, A100)
    assert Runtime().resolve().dtype == "bfloat16"


def test_tf32_and_cuda_graphs_on_a_cpu_make_no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert Runtime(tf32=True).resolve() == Runtime(cuda_graphs=True).resolve() == Runtime().resolve()
    assert not Runtime(cuda_graphs=True).resolve().cuda_graphs


def test_a_gpu_run_fits_a_host_with_another_processor_and_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, H100, H100, instruction_set="avx512")
    run = Runtime().resolve()
    machine(monkeypatch, H100, H100, instruction_set="avx2")
    assert run.misfits() == []
    machine(monkeypatch, A100, H100)
    assert run.misfits() == [
        "gpu: wanted NVIDIA H100 80GB HBM3 (9.0), here NVIDIA A100-SXM4-40GB (8.0) + NVIDIA H100 80GB HBM3 (9.0)"
    ]
    machine(monkeypatch, H100, cuda="12.8")
    assert run.misfits() == ["cuda: wanted 13.0, here 12.8", "ranks: wanted 2, here 1"]
    machine(monkeypatch)
    assert run.misfits() == ["device: wanted cuda, here cpu"]


def test_a_cpu_run_fits_a_gpu_host_with_the_same_processor_and_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, H100)
    run = Runtime(device="cpu", ranks=4).resolve()
    assert run.misfits() == [] and (run.gpu, run.cuda) == (NONE, NONE)
    machine(monkeypatch, instruction_set="abacus")
    assert run.misfits() == ["instruction_set: wanted avx2, here abacus"]


def test_the_setting_of_a_machine_is_yaml_that_is_read_as_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    for gpus in ((H100, H100), ()):
        machine(monkeypatch, *gpus)
        here = Runtime().resolve()
        there = Runtime.model_validate(yaml.safe_load(f"{{{here.setting}}}"))
        assert there.resolve() == here


def test_a_gpu_stage_is_strict_about_determinism_and_says_what_float32_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to warn only, torch's attention takes its faster backward pass, which is not deterministic."""
    machine(monkeypatch, H100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for tf32, said in ((True, "tf32"), (False, "ieee")):
        activate(Runtime(threads=1, tf32=tf32).resolve())
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cuda.matmul.fp32_precision == said
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == WORKSPACE


@pytest.mark.parametrize("started", [True, False])
def test_a_stages_peak_memory_on_a_gpu_is_not_that_of_the_stage_before_in_the_same_process(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is CUDA started for it: a rank chooses its GPU later."""
    machine(monkeypatch, H100)
    reset: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: reset.append("reset"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    activate(Runtime(threads=1).resolve())
    assert len(reset) == started


@pytest.mark.parametrize("given", [None, "", ":16:8", ":0:0"])
def test_cuda_that_runs_already_without_deterministic_products_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """cuBLAS reads the variable once: what is set later changes nothing."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if given is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    with pytest.raises(MachineMismatch, match="CUBLAS_WORKSPACE_CONFIG=:4096:8 in the worker's environment"):
        module._settle_cublas(started=True)
    module._settle_cublas(started=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == WORKSPACE
    module._settle_cublas(started=True)


class Calls(TorchDispatchMode):
    """Names, widths and sizes of what torch was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if args and isinstance(args[0], torch.Tensor):
            self.seen.add((func.overloadpacket.__name__, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


def test_no_vector_function_is_first_called_by_several_threads_at_once() -> None:
    """By chance, one such call in some processes is wrong in the fourth digit, and no digest is the same again."""
    with Calls() as calls:
        activate(Runtime(device="cpu", dtype="float32", threads=torch.get_num_threads()).resolve())
    wanted = {(name, dtype, 1) for name in (*VECTOR_MATHS, "cos", "sin", "exp", "log", "sqrt", "tanh")
              for dtype in (torch.float32, torch.float64)}  # fmt: skip
    assert wanted <= calls.seen


RELEASED = """
import re
from pathlib import Path
from components.models.runtime import Runtime, activate, release_memory

def held():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

activate(Runtime(device="cpu").resolve())
blocks = [bytearray(b"x") * 4_000_000 for _ in range(64)]
full = held()
blocks = blocks[7::8]  # the others are free, between blocks in use
freed = held()
release_memory("cpu")
print(full, freed, held())
"""


def test_memory_that_is_freed_between_blocks_in_use_goes_back_to_the_system_when_released_and_not_before() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASED], capture_output=True, text=True, check=True)
    full, freed, released = map(int, done.stdout.split())
    assert full - freed < 4_000_000, "kept for the next tensor"
    assert full - released > 0.95 * 56 * 4_000_000
