"""Every measurement that needs a GPU, in one command; each step keeps its log.

    make bench-gpu                                        # half an hour on one GPU, then 100 updates on real pairs
    make bench-gpu ARGS="--device cpu --quick"            # the same steps at tiny sizes, to see that they run
    make bench-gpu ARGS=--dry-run                         # without a GPU: does each step's program start?

Each step prints a line of the table that goes into docs/benchmarks/throughput.md. A step that fails does not end the
others; the exit code is 1 then. A step's commands and their output are in DIR/STEP.log (DIR is --out,
.tether/bench/gpu).

machine       what `tether doctor` finds, and the driver's own list
tests         the tests of the learning on this host's torch (they compute on the CPU)
repeat        tiny in two homes, float32: sft, reward and ppo end in the same digests
resume        the same, killed after PPO's first checkpoint and started again: the same digests
losses        sft's and reward's losses, step by step, within 1e-4 of the CPU's in float32
throughput    PPO's update at 135 M and 1 B in bfloat16: rollout against the bandwidth limit, training against the peak
lora          peak memory of PPO's four models on one backbone against one model's LoRA training
gpu profile   the stages of the profile `gpu`
real pairs    100 updates of SmolLM2 on real pairs (TETHER_DATA, `tether fetch smollm2`): reward up at level KL
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.jsonl import read_rows
from components.models.runtime import usable_gpus
from tests.bench.tools import ROOT, argument_parser, tether

TRAINED = ("sft", "reward", "ppo")
SAME_LOSS = 1e-4
"""Largest relative difference of a loss on two devices, float32."""
BANDWIDTHS = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12}
"""Memory bandwidth in bytes/s by a part of a GPU's name, from NVIDIA's data sheets (SXM). Both multiply bfloat16 at 989
TFLOP/s, which is `throughput.py`'s default."""
Found = str
"""What a step measured, in a few words."""


class Failed(Exception):
    """A step found something wrong."""


class Started(Exception):
    """In a dry run: a step's program starts, takes its options, and would go on from here."""


class Bench:
    """The steps' options, homes and logs."""

    def __init__(self, device: str, quick: bool, out: Path, dry: bool = False) -> None:
        self.device, self.quick, self.out, self.dry = device, quick, out.resolve(), dry
        self.log = self.out / "none.log"
        self.out.mkdir(parents=True, exist_ok=True)

    def run(self, *command: str, **environment: str) -> str:
        """Run a command with its output in the step's log; returns its standard output.

        Raises:
            Failed: it ended with an exit code other than 0, or is not installed. Started: in a dry run.
        """
        if self.dry:
            raise Started(self.started(command))
        if shutil.which(command[0]) is None:
            raise Failed(f"{command[0]} is not installed here")
        return self._ran(command, environment)

    def started(self, command: Sequence[str]) -> str:
        """Start what a command starts, with its options, so that it ends before it computes; returns what was seen.

        Raises:
            Failed: it doesn't start, or has no such profile, option or test.
        """
        _, *rest = command
        if rest[:3] == ["-m", "flows.cli", "run"]:
            options = [part for at, part in enumerate(rest) if part == "--set" or rest[at - 1] == "--set"]
            self._ran([*command[:3], "show-config", rest[3], *options], {})
            return f"tether run {rest[3]} has its profile and options"
        if rest[:2] == ["-m", "pytest"]:
            return self._ran([*command, "--collect-only"], {}).strip().splitlines()[-1]
        told = self._ran([*command, "--help"], {})
        if lacking := [part for part in rest if part.startswith("--") and part not in told]:
            raise Failed(f"{rest[1]} has no option {', '.join(lacking)}")
        return f"{rest[1]} starts and has its options"

    def _ran(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=log, text=True
            )
            log.write(done.stdout)
        if done.returncode:
            raise Failed(f"{command[0]} ended with exit code {done.returncode}; see {self.log}")
        return done.stdout

    def python(self, *arguments: str) -> str:
        """Run this Python."""
        return self.run(sys.executable, *arguments, OMP_WAIT_POLICY="PASSIVE")

    def tiny(self, name: str, device: str) -> Path:
        """A new home in which the profile tiny has trained on `device` in float32, up to PPO."""
        home = self.home(name)
        self.run(*self.tiny_command(device), TETHER_HOME=str(home))
        return home

    def home(self, name: str) -> Path:
        """The path of a home that does not exist yet."""
        home = self.out / "homes" / name
        shutil.rmtree(home, ignore_errors=True)
        return home

    def tiny_command(self, device: str) -> list[str]:
        """`tether run tiny`, checkpointed often."""
        given = [f"runtime.device={device}", "runtime.dtype=float32", "ppo.checkpoint_every=1"]
        options = [part for each in given for part in ("--set", each)]
        return [sys.executable, "-m", "flows.cli", "run", "tiny", "--until", "ppo", *options]


def stages(home: Path) -> dict[str, dict[str, Any]]:
    """The stages of a home's newest run, by name."""
    return {each["name"]: each for each in json.loads(tether(home, "status", "--json").stdout)["stages"]}


def digests(home: Path) -> dict[str, str]:
    """Digest of each artifact that training made, by stage."""
    found = stages(home)
    return {name: found[name]["digest"] for name in TRAINED}


def unlike(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The stages whose digests differ."""
    return [name for name in TRAINED if one[name] != other[name]]


def losses(home: Path, stage: str) -> list[float]:
    """The training loss of each step of a home's only run."""
    (file,) = home.glob(f"runs/*/metrics/{stage}.jsonl")
    metric = f"{stage}/train_loss"
    return [row["metrics"][metric] for row in read_rows(file) if metric in row["metrics"]]


def largest_difference(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two curves.

    Raises:
        Failed: they have not the same number of steps, or none.
    """
    if len(one) != len(other) or not one:
        raise Failed(f"curves of {len(one)} and {len(other)} steps can't be compared")
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def machine(bench: Bench) -> Found:
    """See the module's docstring; so do the functions below."""
    doctor = [sys.executable, "-m", "flows.cli", "doctor"]
    if bench.dry:
        bench.run(*doctor)
    if bench.device == "cuda":
        bench.run("nvidia-smi")
    said = bench.run(*doctor, TETHER_HOME=str(bench.home("doctor")))
    return " ".join(next(line for line in said.splitlines() if "runtime" in line).split())


def suite(bench: Bench) -> Found:
    """The tests of the learning."""
    which = ["models/test_runtime.py", "models/test_sampling.py"] if bench.quick else ["models", "training", "ppo"]
    where = [str(ROOT / "tests" / "components" / each) for each in which]
    return bench.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *where).strip().splitlines()[-1]


def repeat(bench: Bench) -> Found:
    """Two homes, the same digests."""
    one, other = digests(bench.tiny("one", bench.device)), digests(bench.tiny("two", bench.device))
    if different := unlike(one, other):
        raise Failed(f"another digest in {', '.join(different)}")
    return "the same digests: " + ", ".join(f"{name} {digest[:12]}" for name, digest in one.items())


def resume(bench: Bench) -> Found:
    """Killed and started again."""
    home = bench.home("killed")
    command, environment = bench.tiny_command(bench.device), os.environ | {"TETHER_HOME": str(home)}
    if bench.dry:
        bench.run(*command)
    with bench.log.open("a", encoding="utf-8") as log:
        going = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        while going.poll() is None and not list(home.glob("work/**/checkpoint/ppo/step-*.json")):
            time.sleep(0.02)
        if going.poll() is not None:
            raise Failed("the run ended before PPO's first checkpoint")
        os.killpg(going.pid, signal.SIGKILL)
        going.wait()
    bench.run(*command, TETHER_HOME=str(home))
    if different := unlike(digests(bench.out / "homes" / "one"), digests(home)):
        raise Failed(f"another digest in {', '.join(different)}")
    return "the same digests after SIGKILL in PPO"


def equal_losses(bench: Bench) -> Found:
    """This device against the CPU."""
    there = bench.tiny("cpu", "cpu")
    found = {}
    for stage in ("sft", "reward"):
        found[stage] = largest_difference(losses(bench.out / "homes" / "one", stage), losses(there, stage))
    if max(found.values()) > SAME_LOSS:
        raise Failed(f"losses differ by {found}")
    return ", ".join(f"{stage} within {value:.1e}" for stage, value in found.items())


def throughput(bench: Bench) -> Found:
    """Ours alone, against the device's limits."""
    sizes = ["1m"] if bench.quick else ["135m", "1b"]
    name = usable_gpus().name
    known = next((each for part, each in BANDWIDTHS.items() if part in name), None)
    limits = [] if known is None else ["--bandwidth", f"{known:g}"]
    given = ["--alone", "--device", bench.device, "--dtype", "bfloat16", "--updates", "1", *limits, "--sizes", *sizes]
    said = bench.python("-m", "tests.bench.trl.throughput", *given)
    shown = [line for line in said.splitlines() if "samples/s" in line or "left out" in line]
    if known is None and bench.device == "cuda":
        shown.append(f"the limits are an H200's: those of {name} are not known here (BANDWIDTHS)")
    return "; ".join(shown)


def lora(bench: Bench) -> Found:
    """Peak memory of LoRA's four models."""
    model = os.environ.get("TETHER_HOME", ".tether") + "/models/smollm2"
    if not bench.dry and not (ROOT / model).is_dir():
        raise Failed(f"no model in {model}: `tether fetch smollm2`")
    small = ["--batch", "2", "--micro-batch", "2", "--prompt", "8", "--response", "8"] if bench.quick else []
    lora_memory = ("-m", "tests.bench.gpu.lora_memory")
    return bench.python(*lora_memory, "--device", bench.device, "--model", model, *small).strip().splitlines()[-1]


def gpu_profile(bench: Bench) -> Found:
    """The stages of the profile `gpu`."""
    home, profile = bench.home("profile"), "tiny" if bench.quick else "gpu"
    given = ["--set", f"runtime.device={bench.device}"]
    bench.run(sys.executable, "-m", "flows.cli", "run", profile, *given, TETHER_HOME=str(home))
    return ", ".join(f"{name} {each['seconds']:.0f} s" for name, each in stages(home).items())


def real_pairs(bench: Bench) -> Found:
    """100 updates of SmolLM2."""
    data = Path(os.environ.get("TETHER_DATA", ROOT / ".." / "shared" / "data")).resolve() / "hh-rlhf"
    if not bench.dry and (bench.quick or not data.is_dir()):
        return "not run" if bench.quick else f"not run: no real pairs in {data}"
    files = ", ".join(str(data / f"{kind}-base-test.jsonl.gz") for kind in ("helpful", "harmless"))
    given = (f"data.preferences=[{files}]", f"runtime.device={bench.device}")
    home = str(bench.out / "homes" / "real")
    said = bench.python("-m", "tests.bench.policies.classic", "--home", home, *(x for g in given for x in ("--set", g)))
    return said.strip().splitlines()[-1]


STEPS: dict[str, Callable[[Bench], Found]] = {
    "machine": machine, "tests": suite, "repeat": repeat, "resume": resume, "losses": equal_losses,
    "throughput": throughput, "lora": lora, "gpu profile": gpu_profile, "real pairs": real_pairs,
}  # fmt: skip


def main() -> None:
    """Run the steps and print a Markdown table as they end."""
    options = argument_parser(__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--quick", action="store_true", help="tiny sizes: shows that the steps run, measures nothing")
    options.add_argument("--dry-run", action="store_true", help="only see that the steps' programs start; needs no GPU")
    options.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="losses and resume need repeat")
    options.add_argument("--out", type=Path, default=ROOT / ".tether" / "bench" / "gpu")
    asked = options.parse_args()
    bench, failed = Bench(asked.device, asked.quick, asked.out, asked.dry_run), False
    found = usable_gpus()
    lacking = "" if found.gpus or asked.device == "cpu" else f"No GPU: {found.why}."
    if lacking and not asked.dry_run:
        print(
            f"{lacking} Nothing was measured. --dry-run checks that the steps start, --device cpu --quick runs them "
            "at tiny sizes.", file=sys.stderr,
        )  # fmt: skip
        sys.exit(2)
    if lacking:
        print(f"{lacking} Nothing is measured.\n")
    print("| step | seconds | found |\n|---|---|---|", flush=True)
    for name in asked.steps:
        bench.log = bench.out / f"{name.replace(' ', '-')}.log"
        bench.log.unlink(missing_ok=True)
        began = time.perf_counter()
        try:
            said = STEPS[name](bench)
        except Started as started:
            said = f"not measured: {started}"
        except Failed as error:
            failed, said = True, f"**failed**: {error}"
        print(f"| {name} | {time.perf_counter() - began:.0f} | {said} |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
