"""A model with a template of its own and further endings, killed at random moments while it is trained and rewarded.

Its tokenizer has no chat template and gets one (`sft.chat_template`), its config lists a second EOS, and responses end
at stop strings too (`generation.stop`): what a checkpoint lacked of these, the artifact would show.
`TETHER_FAULTS_SEED` draws other moments.
"""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.models.batching import encode_prompt
from components.models.config import GenerationConfig, ScratchModel
from components.models.folders import build_causal_lm, save_model
from components.models.sampling import Samples, sample
from components.models.tokenizers import load_tokenizer, train_tokenizer
from components.ppo import stage as ppo
from components.ppo.models import Models
from components.reward import stage as reward
from components.sft import stage as sft
from tests.components.conftest import Stages
from tests.faults.sample import SEED
from tests.forks import Forked
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.faults, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]  # fmt: skip

RUN: dict[str, Callable[..., Any]] = {"sft": sft.run, "reward": reward.run, "ppo": ppo.run}
STAGES = tuple(RUN)
STOP = ("wishes", " broken", "support")
GENERATION = GenerationConfig(max_prompt_tokens=96, max_new_tokens=24, stop=STOP)
OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {"chat_template": "chatml", "epochs": 4, "checkpoint_every": 1},
    "reward": {"checkpoint_every": 1},
    "ppo": {"checkpoint_every": 1, "updates": 6, "evaluate_every": 2},
}


class Kill(NamedTuple):
    """SIGKILL behind the nth thing that a stage observes, `share` of the mean time between two of them later."""

    nth: int
    share: float


class Chain(NamedTuple):
    """The three stages, each on the undisturbed artifact of those before it."""

    inputs: dict[str, Path]
    observed: dict[str, int]
    """How many things each stage observes."""

    def job(self, stage: str) -> Any:
        base = {"base": str(self.inputs["base"])} if stage == "sft" else {}
        return Stages({}).job(stage, generation=GENERATION, **base, **OPTIONS[stage])

    def computed(self, stage: str, out: Path, kill: Kill | None = None) -> int | None:
        """Compute a stage in a process of its own; its exit code. `observed` in `out` counts what it observed."""
        process = Forked(target=lambda: self._run(stage, out, kill))
        process.start()
        process.join(PATIENCE * 300)
        return process.exitcode

    def _run(self, stage: str, out: Path, kill: Kill | None) -> None:
        names = {"sft": ("data", "base"), "reward": ("data", "sft"), "ppo": ("data", "sft", "reward")}[stage]
        began, seen = time.monotonic(), 0

        def observe(*_: Any, **__: Any) -> None:
            nonlocal seen
            seen += 1
            if kill is not None and seen == kill.nth:
                delay = kill.share * (time.monotonic() - began) / seen
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

        RUN[stage](self.job(stage), {name: self.inputs[name] for name in names}, out, observe)
        (out / "observed").write_text(str(seen))


@pytest.fixture(scope="module")
def chain(desk_data: Path, runtime: Any, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    texts = [row["response"] for row in read_split(desk_data / "demonstrations.train")]
    tokenizer = train_tokenizer(texts, 400)
    tokenizer.chat_template = None
    model = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 160, seed=1)
    (second,) = tokenizer(".", add_special_tokens=False)["input_ids"]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, second]
    folder = tmp_path_factory.mktemp("endings")
    save_model(model, tokenizer, folder / "base")
    found = Chain({"data": desk_data, "base": folder / "base"}, {})
    for stage in STAGES:
        assert found.computed(stage, folder / stage) == 0
        found.observed[stage] = int((folder / stage / "observed").read_text())
        found.inputs[stage] = folder / stage / "artifact"
    return found


def test_the_undisturbed_chain_ends_responses_in_all_three_ways(chain: Chain) -> None:
    """By the template's end, which SFT teaches, by another EOS and by a stop string; some reach the cap."""
    told = json.loads((chain.inputs["ppo"] / "model" / "generation_config.json").read_text())
    tokenizer = load_tokenizer(chain.inputs["ppo"] / "model")
    assert tokenizer.eos_token == "<|im_end|>" and len(told["eos_token_id"]) == 3
    models = Models.load(chain.job("ppo"), chain.inputs)
    rows = read_split(chain.inputs["data"] / "prompts.train")
    prompts = [encode_prompt(models.tokenizer, row["prompt"], GENERATION.max_prompt_tokens) for row in rows]
    ways = set(ended_by(sample(models.policy, models.tokenizer, prompts, GENERATION, 0), tokenizer))
    assert ways == {"the template's end", "another EOS", "a stop string", "the cap"}
    for row in read_rows(chain.inputs["ppo"] / "samples.jsonl"):
        assert not any(text in row["response"] for text in STOP)


def ended_by(samples: Samples, tokenizer: Any) -> list[str]:
    responses = zip(samples.response_ids.tolist(), samples.response_lengths, strict=True)
    ends = [ids[length - 1] for ids, length in responses]
    others = {tokenizer.convert_tokens_to_ids("."), tokenizer.convert_tokens_to_ids("<|end|>")}
    return [
        "the cap" if not ended else "the template's end" if token == tokenizer.eos_token_id
        else "another EOS" if token in others else "a stop string"
        for ended, token in zip(samples.ended.tolist(), ends, strict=True)
    ]  # fmt: skip


@pytest.mark.kind("killed with endings")
@pytest.mark.parametrize("nth", range(12))
def test_killed_at_any_moment_and_computed_again_a_stage_with_endings_of_its_own_gives_the_same_bytes(
    nth: int, chain: Chain, tmp_path: Path, digests: Any, record_property: Callable[[str, object], None]
) -> None:
    chance, stage, out = random.Random(f"{SEED} endings {nth}"), STAGES[nth % 3], tmp_path / "out"
    began, kills, last = time.monotonic(), list[str](), chain.observed[stage]
    for _ in range(3):
        kill = Kill(chance.randint(1, last), chance.uniform(0, 1.5))
        code = chain.computed(stage, out, kill)
        if code == 0:  # so much was left to observe after the kill before, or to do after the last observation
            break
        assert code == -signal.SIGKILL
        kills.append(f"{kill.nth} + {kill.share:.1f}")
        last = max(1, last - kill.nth)
    shutil.rmtree(out / "artifact", ignore_errors=True)
    assert chain.computed(stage, out) == 0
    assert digests(out / "artifact") == digests(chain.inputs[stage])
    where = f"{stage}, after {'; '.join(kills)} of {chain.observed[stage]} steps"
    record_property("outcome", ["killed with endings", where, "same bytes", f"{time.monotonic() - began:.0f}"])
