"""What the tests of the learning share: a small validate artifact, and tiny models trained on it by the real stages."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.base.jsonl import write_json
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.direct.config import DirectJob, PolicyConfig
from components.models.config import GenerationConfig, ScratchModel
from components.models.runtime import Runtime
from components.ppo.config import PpoConfig, PpoJob
from components.reward.config import RewardConfig, RewardJob
from components.sft.config import SftConfig, SftJob
from tests.splits import published, write_split

TINY = ScratchModel(hidden_size=16, layers=1, heads=2)
GENERATION = GenerationConfig(max_prompt_tokens=64, max_new_tokens=10)
RUNTIME = Runtime(device="cpu", dtype="float32", threads=1, instruction_set="default").resolve()


def silent(step: int, metrics: Mapping[str, float], total: int | None = None, **_: Any) -> None:
    """An `observe` that nobody reads."""


def of_steps(tell: Callable[..., None]) -> Callable[..., None]:
    """An `observe` that passes on what steps measure, and not what the stage does after them."""

    def observe(step: int, metrics: Mapping[str, float], total: int | None = None, **told: Any) -> None:
        if metrics:
            tell(step, metrics, total=total, **told)

    return observe


class Language(NamedTuple):
    """A language model (random weights) and its tokenizer."""

    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    """Token ids of twelve prompts of different lengths."""


class Stages(NamedTuple):
    """The three training stages with tiny options, and the artifacts that they read."""

    inputs: dict[str, Path]

    def run(self, stage: str, out: Path, observe: Callable[..., None] = silent, **options: Any) -> dict[str, float]:
        """Run `sft`, `reward`, `ppo` or `direct` with `options` over the tiny ones; the artifact is `out/artifact`."""
        import importlib

        module = importlib.import_module(f"components.{stage}.stage")
        return module.run(self.job(stage, **options), self.inputs_of(stage), out, observe)

    def inputs_of(self, stage: str) -> dict[str, Path]:
        """What a stage reads of `inputs`."""
        refreshed = [name for name in ("previous_reward", "previous_data") if name in self.inputs]
        external = [name for name in self.inputs if name.startswith("rewards/")]
        base = [name for name in self.inputs if name == "base"]
        names = {"sft": ["data", *base], "reward": ["data", "sft", *refreshed]}
        return {name: self.inputs[name] for name in names.get(stage, ["data", "sft", "reward", *external])}

    def job(self, stage: str, *, seed: int = 0, **options: Any) -> Any:
        """The job of a stage with `options` over the tiny ones."""
        common: dict[str, Any] = {"seed": seed, "runtime": RUNTIME, "generation": options.pop("generation", GENERATION)}
        if stage == "sft":
            tiny: dict[str, Any] = {"scratch": TINY, "learning_rate": 1e-2, "evaluate": 8, "checkpoint_every": 2}
            tiny |= {"overlong": "cut"}  # most replies are longer than ten tokens
            return SftJob(**common, sft=SftConfig(**tiny | {"batch_size": 32, "micro_batch_size": 16} | options))
        if stage == "reward":
            tiny = {"scale_responses": 16, "checkpoint_every": 2, "batch_size": 16, "micro_batch_size": 8}
            tiny["learning_rate"] = 5e-4
            return RewardJob(**common, reward=RewardConfig(**tiny | options))
        if stage == "direct":
            tiny = {"method": "dpo", "learning_rate": 1e-3, "batch_size": 16, "micro_batch_size": 8}
            tiny |= {"checkpoint_every": 2, "evaluate_every": 3}
            measures = {"evaluate": 8, "watch": {"prompts": 8}, "repeats": {"prompts": 4, "samples": 2}}
            common["chosen_limit"] = options.pop("chosen_limit", None)
            return DirectJob(**common, ppo=measures | options.pop("ppo", {}), policy=PolicyConfig(**tiny | options))
        tiny = {"updates": 5, "batch_size": 8, "minibatch_size": 4, "micro_batch_size": 2, "checkpoint_every": 2}
        tiny |= {"kl": {"control": "fixed", "coefficient": 0.1}, "sample_every": 2, "learning_rate": 1e-3}
        tiny |= {"evaluate": 8, "watch": {"prompts": 8}}  # one batch: of all prompts these took half of a run's time
        options["critic"] = {"learning_rate": 1e-3} | options.get("critic", {})
        return PpoJob(**common, ppo=PpoConfig(**tiny | options))


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """One thread, float32: what the bytes of these tests depend on."""
    import torch

    torch.set_num_threads(1)
    return RUNTIME


@pytest.fixture(scope="session")
def desk_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small validate artifact of the support desk, cut without hashing (the splits have tests of their own)."""
    data = tmp_path_factory.mktemp("data")
    demonstrations, pairs = generate(0, SupportDeskConfig(demonstrations=220, pairs=160))
    write_split(data / "demonstrations.train", demonstrations[:200])
    write_split(data / "demonstrations.heldout", demonstrations[200:])
    for split, rows in (("train", pairs[:100]), ("calibration", pairs[100:130]), ("test", pairs[130:])):
        write_split(data / f"pairs.{split}", published(rows))
        write_split(data / f"prompts.{split}", ({"prompt": r["prompt"], "category": r["category"]} for r in rows))
    write_json(data / "task.json", {"name": "support-desk"})
    return data


@pytest.fixture(scope="session")
def stages(desk_data: Path, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The stages with their inputs: SFT and reward artifacts that the stages themselves made, once."""
    made = Stages({"data": desk_data})
    for stage in ("sft", "reward"):
        out = tmp_path_factory.mktemp(stage)
        made.run(stage, out)
        made.inputs[stage] = out / "artifact"
    return made


@pytest.fixture(scope="session")
def labelled(stages: Stages, desk_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The stages with data that also have 40 single labels for training, of which every fourth is undesirable."""
    data = tmp_path_factory.mktemp("labelled") / "data"
    shutil.copytree(desk_data, data)
    _, pairs = generate(1, SupportDeskConfig(demonstrations=50, pairs=60))
    rows = [
        {
            "prompt": row["prompt"], "response": row["chosen" if i % 4 else "rejected"], "desirable": i % 4 > 0,
            "source": "demonstrations", "row": i + 1,
        }
        for i, row in enumerate(pairs)
    ]  # fmt: skip
    for split, some in (("train", rows[:40]), ("calibration", rows[40:50]), ("test", rows[50:])):
        write_split(data / f"single_labels.{split}", some)
    return Stages(stages.inputs | {"data": data})


@pytest.fixture(scope="session")
def language(runtime: Runtime) -> Language:
    """A Llama with two random layers over the support desk's words. Don't train it: others use it too."""
    from components.models.batching import encode_prompt
    from components.models.folders import build_causal_lm, frozen
    from components.models.tokenizers import train_tokenizer

    demonstrations, _ = generate(1, SupportDeskConfig(demonstrations=200, pairs=50))
    texts = [d["response"] for d in demonstrations] + [m["content"] for d in demonstrations for m in d["prompt"]]
    tokenizer = train_tokenizer(texts, 600)
    model = frozen(build_causal_lm(ScratchModel(hidden_size=24, layers=2, heads=2), tokenizer, 512, seed=3))
    prompts = [encode_prompt(tokenizer, d["prompt"], 64) for d in demonstrations[:12]]
    return Language(model, tokenizer, prompts)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2-135M-Instruct, dequantised and saved as an artifact of SFT; skips where it was not fetched."""
    from components.models.folders import load_base, save_model

    homes = [Path(os.environ.get("TETHER_HOME", ".tether")), Path(__file__).parents[2] / ".tether"]
    fetched = next((home / "models/smollm2" for home in homes if (home / "models/smollm2").is_dir()), None)
    if fetched is None:
        pytest.skip("run `tether fetch smollm2` first: no model in " + " or ".join(str(h / "models") for h in homes))
    saved = tmp_path_factory.mktemp("pretrained") / "artifact"
    save_model(*load_base(fetched), saved / "model")
    yield saved
    shutil.rmtree(saved)


def folder_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder`, by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="session")
def digests() -> Callable[[Path], dict[str, str]]:
    """`digests(folder)`: sha256 of every file in it."""
    return folder_digests


class Interrupting:
    """An `observe` that interrupts the stage, as Ctrl-C would, when it hears of step `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.steps = at, list[int]()
        self.resumed: list[tuple[int, int | None]] = []
        """Step and total, as a stage that goes on from a checkpoint tells them."""

    def __call__(
        self, step: int, metrics: Mapping[str, float], total: int | None = None, *, resumed: bool = False,
        doing: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        if doing is not None:
            return
        if resumed:
            self.resumed.append((step, total))
            return
        self.steps.append(step)
        if step == self.at:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def interrupting() -> type[Interrupting]:
    """The class of reports that interrupt."""
    return Interrupting
