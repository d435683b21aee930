"""Every measurement that needs a GPU, as one program that ends within ten minutes and needs no network.

    python -m tests.bench.gpu.gpu                            # on a host with one GPU
    python -m tests.bench.gpu.gpu --device cpu --quick       # the same steps at tiny sizes, to see that they run

Needs torch and transformers, and the wheels that `--wheels` lists (18 MB), which a host without network is brought.
The steps run in their order, most important first, each in a process of its own with a limit in seconds. Each appends a
JSON line to OUT/gpu.jsonl: what it measured or how it failed, beside what was expected. A step that fails does not end
the others; the exit code is 1 then.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.tools import argument_parser

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WHEELS = (
    "pydantic==2.14.3", "pydantic_core==2.50.4", "annotated-types==0.8.0", "typing-inspection==0.4.5",
    "transformers==5.23.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19",
)  # fmt: skip
"""What a host with torch alone is brought, of the lock where it has it."""
TINY = ("ppo.checkpoint_every=1", "ppo.updates=6")
"""Options of the profile tiny."""
Lines = Iterable[dict[str, Any]]


class Host(NamedTuple):
    """Where a step runs."""

    device: str
    quick: bool
    folder: Path
    """For what steps write."""
    real: Path | None = None
    """A folder with `data`, the validate artifact of hh-smollm2, and `base`, SmolLM2, if it is at hand."""
    graphs: bool = True
    """Whether the step `real` decodes with graphs."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The models' sizes (`gpu_speed.SHAPES`)."""
        return ("tiny",) if self.quick else ("135m", "1.2b")

    @property
    def bandwidth(self) -> float:
        """Of the memory, bytes/s."""
        import torch

        from tests.bench.gpu.gpu_speed import BANDWIDTHS

        name = torch.cuda.get_device_name() if self.device == "cuda" else "H200"
        return next((value for part, value in BANDWIDTHS.items() if part in name), BANDWIDTHS["H200"])


def machine(host: Host) -> Lines:
    """Versions, and the two ceilings."""
    import torch
    import transformers

    yield {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    if host.device == "cuda":
        gpu = ["--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
        yield {"nvidia-smi": subprocess.run(["nvidia-smi", *gpu], capture_output=True, text=True).stdout.strip()}
    from tests.bench.gpu.gpu_speed import now

    width, repeats = (256, 2) if host.quick else (8192, 10)
    block = torch.randn(width * width * (1 if host.quick else 32), device=host.device)
    matrix, target = torch.randn(width, width, device=host.device, dtype=torch.bfloat16), torch.empty_like(block)
    for name, work, amount in (
        ("copy, TB/s", lambda: target.copy_(block), 8 * block.numel()),
        ("product, TFLOP/s", lambda: matrix @ matrix, 2 * width**3),
    ):
        work()
        began = now(host.device)
        for _ in range(repeats):
            work()
        yield {name: round(amount * repeats / (now(host.device) - began) / 1e12, 2)}


def graphs(host: Host) -> Lines:
    """Whether decoding with graphs gives what decoding without them gives."""
    module = [sys.executable, "-m", "tests.bench.gpu.graphs_right", "--device", host.device]
    done = subprocess.run([*module, *["tiny"] * host.quick], stdout=subprocess.PIPE, text=True)
    yield from map(json.loads, done.stdout.splitlines())
    if done.returncode:
        raise SystemExit(f"graphs_right ended with exit code {done.returncode}")


def sampling(host: Host) -> Lines:
    """Decoding with and without graphs."""
    from tests.bench.gpu import gpu_speed

    for size in host.sizes:
        model = gpu_speed.random_llama(size, host.device)
        for rows in (4,) if host.quick else (8, 128, 512):
            for on in (False, True):
                new = (8,) if host.quick else ((64, 256) if on else (64,))
                runtime = gpu_speed.runtime_on(host.device, graphs=on)
                yield gpu_speed.sample(size, model, rows, new, runtime, host.bandwidth)


def profile(host: Host) -> Lines:
    """What is launched for a token."""
    from tests.bench.gpu import gpu_speed

    for size in host.sizes[:1]:
        model = gpu_speed.random_llama(size, host.device)
        for on in (False, True):
            runtime = gpu_speed.runtime_on(host.device, graphs=on)
            yield gpu_speed.launches(size, model, 4 if host.quick else 128, runtime)


def memory(host: Host) -> Lines:
    """What many batches with graphs leave reserved."""
    import torch

    from components.models.config import GenerationConfig
    from components.models.sampling import rollout_engine
    from tests.bench.gpu import gpu_speed

    runtime, model = gpu_speed.runtime_on(host.device, graphs=True), gpu_speed.random_llama(host.sizes[0], host.device)
    tokenizer, reserved, seconds = gpu_speed.numbers_tokenizer(gpu_speed.SHAPES[host.sizes[0]].vocabulary), [], []
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=32)
    for batch in range(3 if host.quick else 20):
        began = gpu_speed.now(host.device)
        with rollout_engine(model, tokenizer, runtime) as engine:
            engine.sample(gpu_speed.prompts_of(32 + 8 * (batch % 3)), generation, batch)
        seconds.append(round(gpu_speed.now(host.device) - began, 3))
        reserved.append(round(torch.cuda.memory_reserved() / 1e6) if host.device == "cuda" else 0)
    yield {"reserved MB": reserved, "seconds": seconds}


def training(host: Host) -> Lines:
    """Training steps."""
    from tests.bench.gpu import gpu_speed

    for size in host.sizes:
        model = gpu_speed.random_llama(size, host.device)
        for rows in (4,) if host.quick else (32, 64, 256):
            yield gpu_speed.train(size, model, rows, gpu_speed.runtime_on(host.device))


def stages(
    home: Path, device: str, *, on: bool, until: str = "ppo", options: Iterable[str] = (), profile: str = "tiny",
    compute: Callable[..., Any] = lambda stage, *given: stage.load_run()(*given),
) -> dict[str, Any]:  # fmt: skip
    """Run the stages of a profile that are missing in `home`; returns the digests, and a time and the metrics of each
    update of PPO. What the home holds as `data` and `base` are their inputs."""
    from components.base.hashing import digest_file, digest_json
    from components.models.runtime import activate
    from flows.config.profiles import parse_override
    from flows.config.run_config import load_config
    from tests.support_desk_data import make_data

    given = [f"runtime.device={device}", "runtime.dtype=bfloat16", f"runtime.cuda_graphs={on}", *options]
    config = load_config(profile, map(parse_override, given))
    if not (home / "data").exists():
        make_data(home / "data", times=4)
    inputs = {name: home / name for name in ("data", "base") if (home / name).exists()}
    times, digests, start = [], {}, time.perf_counter()
    for name in ("sft", "reward", "ppo"):
        stage, out, began = config.stage(name), home / name, time.perf_counter()
        job = config.stage_job(stage)
        job = job.model_copy(update={"runtime": job.runtime.resolve()})
        activate(job.runtime)

        def observe(step: int, metrics: Any, *_: Any, **__: Any) -> None:
            if "ppo/kl" in metrics:
                times.append((time.perf_counter(), dict(metrics)))
                numbers = ", ".join(f"{metrics[f'ppo/{metric}']:.4g}" for metric in ("kl", "proxy_reward", "beta"))
                print(f"update {step}: {numbers} {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

        if not (out / "done").exists():
            compute(stage, job, inputs, out, observe)
            (out / "done").touch()
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        inputs[name] = out / "artifact"
        files = sorted(each for each in inputs[name].rglob("*") if each.is_file())
        digests[name] = digest_json([(each.relative_to(out).as_posix(), digest_file(each)) for each in files])[:12]
        if name == until:
            break
    return {"digests": digests, "times": times}


def repeated(host: Host) -> Lines:
    """PPO of tiny twice, and killed by SIGKILL after update 3 and started again: equal digests."""
    started = stages(host.folder / "reward", host.device, on=True, until="reward", options=TINY)["digests"]
    digests, children = {}, {}
    for name in ("once", "again", "killed"):
        home = shutil.copytree(host.folder / "reward", host.folder / name)
        command = [sys.executable, "-m", "tests.bench.gpu.gpu", "--device", host.device, "--stages", str(home)]
        if name == "killed":
            with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as going:
                assert going.stderr is not None
                if not any(line.startswith("update 3:") for line in going.stderr):
                    raise SystemExit(f"PPO ended with exit code {going.wait()} before update 3")
                going.send_signal(signal.SIGKILL)
        children[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for name, child in children.items():
        said, _ = child.communicate()
        if child.returncode:
            raise SystemExit(f"PPO, {name}, ended with exit code {child.returncode}")
        digests[name] = json.loads(said.splitlines()[-1])["ppo"]
    yield {**started, **digests}
    if len(set(digests.values())) > 1:
        raise SystemExit("the digests differ")


def direct(host: Host) -> Lines:
    """DPO and online DPO of tiny twice, with graphs: equal digests."""
    home = host.folder / "reward"
    stages(home, host.device, on=True, until="reward", options=TINY)
    for method, given in (("dpo", []), ("online_dpo", ["ppo.learning_rate=3e-4"]))[: 1 if host.quick else 2]:
        digests = []
        for turn in ("once", "again"):
            copied = shutil.copytree(home, host.folder / f"{method} {turn}")
            found = stages(copied, host.device, on=True, options=[f"policy.method={method}", *given])
            digests.append(found["digests"]["ppo"])
        yield {"method": method, "digests": digests}
        if len(set(digests)) > 1:
            raise SystemExit("the digests differ")


class ManyRanks(int):
    """The number of ranks, for `spread`, which does not shard the models of a single one."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False


def run_sharded(job: Any, inputs: Mapping[str, Path], out: Path, observe: Any) -> dict[str, float]:
    """Compute the stage of a job on one rank whose models are sharded as those of several are."""
    from unittest.mock import Mock, patch

    from components.distributed import sharding
    from tasks.stages import STAGES

    stage = next(stage for stage in STAGES.values() if stage.job == f"{type(job).__module__}:{type(job).__name__}")
    job = job.model_copy(update={"runtime": job.runtime.model_copy(update={"sharding": "zero3"})})
    shard = Mock(wraps=sharding.fully_shard)
    with patch.object(sharding, "size", lambda: ManyRanks(1)), patch.object(sharding, "fully_shard", shard):
        metrics = dict(stage.load_run()(job, inputs, out, observe))
    assert shard.called
    return metrics


def launched(stage: Any, job: Any, inputs: Mapping[str, Path], out: Path, observe: Any) -> None:
    """Compute a stage by `run_sharded` in a process that the elastic agent starts."""
    from components.distributed.launching import Program, launch
    from tasks.rank_processes import WITHIN

    out.mkdir()
    program = Program("tests.bench.gpu.gpu:run_sharded", stage.job, "components.models.runtime:activate", WITHIN)
    launch(program, stage.name, job, inputs, out, observe, 1, 120.0)


def sharded(host: Host) -> Lines:
    """The stages of tiny by FSDP2's shards over NCCL, on one rank, beside the plain process."""
    for dtype in ("float32",) if host.quick else ("float32", "bfloat16"):
        options, until = [*TINY, "ppo.updates=3", f"runtime.dtype={dtype}"], "sft" if host.quick else "ppo"
        homes = [host.folder / dtype, host.folder / f"{dtype} sharded"]
        plain = stages(homes[0], host.device, on=False, until=until, options=options)["digests"]
        shards = stages(homes[1], host.device, on=False, until=until, options=options, compute=launched)["digests"]
        yield {"dtype": dtype, "plain": plain, "sharded": shards}
        yield {stage: _differences(*(home / stage / "artifact" for home in homes)) for stage in plain}


def _differences(plain: Path, shards: Path) -> dict[str, float]:
    """The largest difference of two artifacts' weights, by file."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(plain.rglob("*.safetensors")):
        name = file.relative_to(plain).as_posix()
        ours, theirs = load_file(file), load_file(shards / name)
        found[name] = max(float((ours[key].float() - theirs[key].float()).abs().max()) for key in ours)
    return found


def decoding(host: Host) -> Lines:
    """Decoding of a model of 8 B."""
    from tests.bench.gpu import gpu_speed

    size = "tiny" if host.quick else "8b"
    model = gpu_speed.random_llama(size, host.device)
    for rows in (4,) if host.quick else (8, 128):
        for on in (False, True):
            runtime = gpu_speed.runtime_on(host.device, graphs=on)
            yield gpu_speed.sample(size, model, rows, (8,) if host.quick else (64,), runtime, host.bandwidth)


def pairs(host: Host) -> Lines:
    """DPO of SmolLM2 on Anthropic's pairs beside TRL's trainer, where their folder is at hand."""
    if host.real is None:
        return
    from tests.bench.trl import direct as bench

    out = host.real / "pairs.jsonl"  # what was measured before a limit stays
    command = [sys.executable, "-m", bench.__name__, "--device", host.device, "--out", str(out), "--sizes", "135m"]
    command += ["--dtype", "bfloat16", "--rounds", "3", "--pairs", "512", "--batch", "16"]
    command += ["--prompt", "128", "--response", "128", "--trl", str(host.real / "trl")]
    command += ["--source", str(host.real / "pairs.jsonl.gz"), "--smollm2", str(host.real / "base")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    yield {"table": done.stdout.splitlines()}
    yield from map(json.loads, out.read_text("utf-8").splitlines() if out.exists() else ())
    if done.returncode:
        raise SystemExit(f"tests.bench.trl.direct ended with exit code {done.returncode}")


@contextlib.contextmanager
def phases(device: str) -> Iterator[dict[str, list[float]]]:
    """Yield the seconds of each phase of each update of PPO."""
    from unittest.mock import patch

    from components.ppo import stage
    from components.ppo.learner import Learner
    from components.training.loop import Loop
    from tests.bench.gpu.gpu_speed import now

    def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = now(device)
            result = function(*arguments, **options)
            seconds.append(now(device) - began)
            return result

        return run

    places = (
        (stage, "sample"), (stage, "gather_experience"), (Learner, "update"), (Loop, "run_observers"), (Loop, "finish")
    )  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for _, name in places}
    with contextlib.ExitStack() as patches:
        for owner, name in places:
            patches.enter_context(patch.object(owner, name, timed(getattr(owner, name), seconds[name])))
        yield seconds


def times_of(updates: Sequence[tuple[float, Any]], seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median seconds of an update and of each of its phases, without the first two."""
    whole = [b - a for a, b in itertools.pairwise(at for at, _ in updates)]
    return {name: round(statistics.median(s[2:]), 3) for name, s in {"an update": whole, **seconds}.items() if s[2:]}


def updates(host: Host) -> Lines:
    """Seconds of PPO's updates, by phase."""
    options = [
        "ppo.updates=6", "generation.max_new_tokens=64", "sft.epochs=1", "sft.max_demonstrations=64",
        "reward.max_pairs=32", "reward.scale_responses=16", "ppo.evaluate_every=null", "ppo.batch_size=64",
        "ppo.minibatch_size=32", "ppo.micro_batch_size=32", "ppo.evaluate=64", "ppo.checkpoint_every=6",
    ]  # fmt: skip
    if not host.quick:
        options.append("sft.scratch={hidden_size: 576, layers: 30, heads: 9, vocabulary: 49152}")
    stages(host.folder / "False", host.device, on=False, until="reward", options=options)
    shutil.copytree(host.folder / "False", host.folder / "True")
    for on in (False, True):
        with phases(host.device) as seconds:
            updates = stages(host.folder / str(on), host.device, on=on, options=options)["times"]
        last = {name: updates[-1][1][name] for name in ("ppo/kl", "ppo/proxy_reward", "ppo/response_tokens")}
        yield {"graphs": on, **times_of(updates, seconds), **last}


def real(host: Host) -> Lines:
    """The classic exercise's tethered run, where its folder is at hand: the raw score up at level KL."""
    from components.stats.series import series_mean, series_rise
    from tests.bench.policies.classic import LATE, PROFILE, SIZES

    if host.real is None:
        return
    options = [*SIZES, "ppo.updates=100", "ppo.checkpoint_every=50"]
    with phases(host.device) as seconds:
        times = stages(host.real, host.device, on=host.graphs, options=options, profile=PROFILE)["times"]
    yield {"updates": len(times), **times_of(times, seconds)}
    for count in (LATE, 75):
        for metric in ("ppo/kl", "ppo/proxy_reward"):
            values = [row[metric] for _, row in times[-count:]]
            yield {"last": count, metric: series_mean(values)._asdict(), "rise": series_rise(values)._asdict()}


def sanitized(host: Host) -> Lines:
    """NVIDIA's memory checker on the smallest case with graphs."""
    command = ["compute-sanitizer", "--tool", "memcheck"] if host.device == "cuda" else []
    case = [sys.executable, "-m", "tests.bench.gpu.graphs_right", "tiny", "--device", host.device]
    done = subprocess.run([*command, *case], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield {"exit code": done.returncode, "said": [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]}


def yardstick(host: Host) -> Lines:
    """Decoding by transformers' own continuous batching."""
    import torch
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from tests.bench.gpu import gpu_speed

    for size in host.sizes:
        model = gpu_speed.random_llama(size, host.device).to(torch.bfloat16)
        for rows in (4,) if host.quick else (128, 512):
            generation = GenerationConfig(max_new_tokens=64, do_sample=True, eos_token_id=1, pad_token_id=0)
            batching = ContinuousBatchingConfig(
                use_cuda_graph=host.device == "cuda", return_logprobs=True, num_blocks=1024, max_batch_tokens=4096
            )
            for _ in range(2):
                began = gpu_speed.now(host.device)
                answers = model.generate_batch(
                    gpu_speed.prompts_of(rows), generation_config=generation, continuous_batching_config=batching,
                    progress_bar=False,
                )  # fmt: skip
                seconds = gpu_speed.now(host.device) - began
            tokens = sum(len(each.generated_tokens) for each in answers.values())
            yield {"size": size, "rows": rows, "tokens/s": round(tokens / seconds), "seconds": round(seconds, 2)}


class Step(NamedTuple):
    """One measurement."""

    limit: int
    """Seconds after which it is ended."""
    run: Callable[[Host], Lines]
    expected: str


STEPS = {
    "machine": Step(40, machine, "copy 3.0 (H100) or 4.3 TB/s (H200), product 770 to 800 TFLOP/s"),
    "graphs": Step(60, graphs, "tokens equal in float32; log-probabilities within 1e-3 on average in bfloat16"),
    "sampling": Step(
        90, sampling, "135m: 42 ms a token; with graphs 6 to 12 (64 new), 3 to 4 (256). 1.2b: 30; 4 to 8; 2 to 3"
    ),
    "profile": Step(60, profile, "no sort a token; with graphs at most 60 launches a token in place of 1,150"),
    "memory": Step(30, memory, "reserved memory stays within 64 MB from the third batch on"),
    "training": Step(60, training, "135m: 140, 150 and 202 ms at 32, 64 and 256 rows; 1.2b: 106, 175 and 564 ms"),
    "repeated": Step(90, repeated, "three equal digests of PPO"),
    "direct": Step(60, direct, "two equal digests of each method"),
    "sharded": Step(180, sharded, "weights equal in bfloat16, within 1e-6 in float32, as on the CPU"),
    "decoding": Step(60, decoding, "8b: 40 ms a token; with graphs 6 to 8, 60 % of the bandwidth's limit at 8 rows"),
    "pairs": Step(480, pairs, "at least 1.5 times TRL's pairs/s at no more than 0.8 of its memory"),
    "updates": Step(160, updates, "an update takes half the time with graphs"),
    "sanitized": Step(150, sanitized, "0 errors"),
    "real": Step(420, real, "over the last 50 updates KL level near 3 and the raw score's rise above 0, as on CPUs"),
    "yardstick": Step(60, yardstick, "slower than graphs at 64 tokens without flash-attn"),
}


def run(name: str, host: Host, limit: float) -> dict[str, Any]:
    """Run a step in a process of its own and end all it started; returns its line."""
    command = [sys.executable, "-m", "tests.bench.gpu.gpu", "--device", host.device, "--step", name]
    command += ["--out", str(host.folder), *([] if host.real is None else ["--real", str(host.real)])]
    command += ["--quick"] * host.quick + ["--no-graphs"] * (not host.graphs)
    began, error = time.perf_counter(), ""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            code = child.wait(limit)
            error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"ended after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        errors.seek(0)
        lines = [json.loads(line) for line in out if line.startswith("{")]
        tail = errors.read()[-20_000:] if error else ""
    line: dict[str, Any] = {"step": name, "seconds": round(time.perf_counter() - began, 1), "found": lines}
    return line | {"expected": STEPS[name].expected} | ({"error": error, "tail": tail} if error else {})


def main() -> int:
    """Run the steps, print a line of each as it ends, and return the exit code."""
    options = argument_parser(__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--quick", action="store_true", help="tiny sizes: shows that the steps run, measures nothing")
    options.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    options.add_argument("--seconds", type=float, default=560, help="no step goes on beyond")
    options.add_argument("--out", type=Path, default=Path(".tether/bench/gpu"))
    options.add_argument("--real", type=Path, help="a folder for the step real")
    options.add_argument("--no-graphs", action="store_true", help="the step real decodes without graphs")
    options.add_argument("--wheels", action="store_true", help="print what the host needs beside torch")
    options.add_argument("--step", choices=STEPS, help="the program itself uses it")
    options.add_argument("--stages", type=Path, help="the program itself uses it")
    asked = options.parse_args()
    if asked.wheels:
        print(*WHEELS)
        return 0
    if asked.stages:
        print(json.dumps(stages(asked.stages, asked.device, on=True, options=TINY)["digests"]))
        return 0
    host = Host(asked.device, asked.quick, asked.out.resolve(), asked.real, not asked.no_graphs)
    ends = time.monotonic() + asked.seconds
    if asked.step:
        for line in STEPS[asked.step].run(host):
            print(json.dumps(line), flush=True)
        return 0
    host.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with (host.folder / "gpu.jsonl").open("w", encoding="utf-8") as file:
        for name in asked.steps:
            with tempfile.TemporaryDirectory() as folder:
                left = ends - time.monotonic()
                limit = STEPS[name].limit * (1 if host.device == "cuda" else 4)
                line: dict[str, Any] = {"step": name, "error": "no time was left"}
                if left > 10:
                    line = run(name, host._replace(folder=Path(folder)), min(left, limit))
            failed |= "error" in line
            print(json.dumps(line), file=file, flush=True)
            print(f"{name}: {line.get('seconds', 0)} s; expected: {STEPS[name].expected}", flush=True)
            for found in filter(None, [*line.get("found", []), line.get("error"), line.get("tail", "")[-1500:]]):
                print(f"  {found}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
