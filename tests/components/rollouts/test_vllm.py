"""PPO through a running vLLM on loopback, in a virtual environment of its own: `make test-vllm` (minutes).

The model is small, with heads that a CPU can serve (32 wide), and its output layer is tied or not.
`TETHER_RECORD=1 make test-vllm ARGS="-k recorded"` writes recorded.json, the answers that the stand-in of the quick
tests is checked against.
"""

import copy
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.models.batching import encode_prompt
from components.models.config import GenerationConfig
from components.models.folders import load_causal_lm, save_model
from components.models.logprobs import token_stats
from components.models.runtime import Runtime
from components.ppo.models import Packed, scatter
from components.rollouts.client import VllmClient, resolve_rollout
from components.rollouts.config import RolloutConfig
from components.rollouts.engine import VllmEngine, check_server, open_rollouts
from components.training.checkpoint import load_latest
from tests.components.rollouts.standin import RECORD, recorded, shape
from tests.forks import Forked
from tests.servers import LocalServer
from tests.waiting import PATIENCE

PROGRAM = os.environ.get("TETHER_VLLM", "")
CACHE = Path(PROGRAM).parent.parent / "cache"
"""Of what it compiles for its first answer: 15 s and more."""
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PROGRAM, reason="`make test-vllm` installs vLLM and names it in TETHER_VLLM"),
]
CAP = GenerationConfig(max_prompt_tokens=64, max_new_tokens=12)


class VllmServer(LocalServer):
    """`vllm serve` with a model's folder."""

    name = "vLLM"

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__(folder)
        self.model, self.url = model, f"http://127.0.0.1:{self.port}"
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)  # four processes would compile its sources at each start
        self._environment |= {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": f"{CACHE}", "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
        }  # fmt: skip

    def start(self) -> "VllmServer":
        """Start it, and return once it answers."""
        self._start(
            PROGRAM, "serve", str(self.model), "--served-model-name", "policy", "--host", "127.0.0.1", "--port",
            str(self.port), "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--dtype",
            "float32", "--enforce-eager", "--max-num-seqs", "32", health=f"{self.url}/health",
        )  # fmt: skip
        return self

    def config(self, **options: Any) -> RolloutConfig:
        """A config that asks it, resolved. Its first answer takes a compiler a while."""
        given = {"engine": "vllm", "url": self.url, "timeout": 600.0, "retries": 1}
        return resolve_rollout(RolloutConfig(**given | options))


def of_heads_for_a_cpu(stages: Any, runtime: Runtime, folder: Path, tied: bool) -> Any:
    """The stages from an SFT model with two heads of 32."""
    made = type(stages)({"data": stages.inputs["data"]})
    made.run("sft", folder / "sft", scratch={"hidden_size": 64, "layers": 2, "heads": 2})
    made.inputs["sft"] = folder / "sft" / "artifact"
    model, tokenizer = load_causal_lm(made.inputs["sft"], runtime)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        shutil.rmtree(made.inputs["sft"] / "model")
        save_model(model, tokenizer, made.inputs["sft"] / "model")
    made.run("reward", folder / "reward")
    made.inputs["reward"] = folder / "reward" / "artifact"
    return made


@pytest.fixture(scope="module")
def served(stages: Any, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, VllmServer]]:
    """The stages with an untied model, and a server that was started with it."""
    folder = tmp_path_factory.mktemp("untied")
    made = of_heads_for_a_cpu(stages, runtime, folder, tied=False)
    server = VllmServer(made.inputs["sft"] / "model", folder)
    yield made, server.start()
    server.stop()


@pytest.fixture(scope="module")
def undisturbed(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run to which nothing happened."""
    stages, server = served
    out = tmp_path_factory.mktemp("undisturbed")
    stages.run("ppo", out, rollout=server.config())
    return out


def test_it_answers_as_recorded(served: Any) -> None:
    _, server = served
    answers = recorded(server.url, server.model)
    if os.environ.get("TETHER_RECORD") == "1":
        lines = [f"{json.dumps(route)}: {json.dumps(answer)}" for route, answer in answers.items()]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert shape(answers) == shape(json.loads(RECORD.read_text()))


def test_it_samples_from_each_sent_version_of_the_weights(served: Any, runtime: Runtime, tmp_path: Path) -> None:
    """And the same seeds give the same bits, alone and among others; earlier weights fail the proof."""
    stages, server = served
    policy, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
    rows = read_split(stages.inputs["data"] / "prompts.train")[:16]
    prompts = [encode_prompt(tokenizer, row["prompt"], 64) for row in rows]
    torch.manual_seed(0)
    with open_rollouts(server.config(), tokenizer, runtime, tmp_path / "sent") as opened:
        for _ in range(3):
            earlier = copy.deepcopy(policy)
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.add_(0.1 * weight.abs().mean() * torch.randn_like(weight))
            with opened.engine(policy, None) as engine:
                samples, again = (engine.sample(prompts, CAP, seed=3) for _ in range(2))
                requests = [engine.request(prompt, CAP, seed=1) for prompt in prompts]  # type: ignore[union-attr]
                assert engine.is_batch_invariant(requests), "at this size, on a CPU"  # type: ignore[union-attr]
                greedy = engine._ask([each | {"temperature": 0.0} for each in requests])  # type: ignore[union-attr]
                object.__setattr__(engine, "policy", earlier)
                with pytest.raises(UserError, match="does not sample from the weights that were sent"):
                    engine.prove_weights(requests[0])  # type: ignore[union-attr]
            assert torch.equal(samples.response_ids, again.response_ids)
            assert torch.equal(samples.logprobs, again.logprobs)
            batch, mask = Packed.of(samples, range(len(prompts))), samples.response_mask
            path = token_stats(policy, batch.ids, batch.mask, batch.counts, runtime).logprobs
            k1 = (samples.logprobs - scatter(path, mask))[mask].double()
            print(f"KL {(torch.expm1(-k1) + k1).mean():.2g} nats a token, largest difference {k1.abs().max():.2g}")
            assert (torch.expm1(-k1) + k1).mean() < 1e-9 and k1.abs().max() < 1e-4
            for prompt, answer in zip(prompts, greedy, strict=True):
                with torch.no_grad():
                    logits = policy(torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1].clone()
                logits[:, tokenizer.pad_token_id] = -torch.inf
                assert logits.argmax(-1).tolist() == answer.ids


def test_ppo_trains_on_its_responses(undisturbed: Path) -> None:
    history = read_rows(undisturbed / "artifact" / "history.jsonl")
    assert len(history) == 5 and list((undisturbed / "sent").iterdir()) == []
    for row in history:
        assert row["ppo/sampler_drift"] < 1e-9 and row["ppo/importance_truncated"] == 0
        assert row["ppo/importance_max"] == pytest.approx(1, abs=1e-3)


def test_another_version_and_too_long_responses_are_refused(served: Any, runtime: Runtime) -> None:
    _, server = served
    config, long = server.config(version="0.28.1"), GenerationConfig(max_prompt_tokens=500, max_new_tokens=100)
    with pytest.raises(UserError, match=r"resolved for 0\.28\.1: .*--max-model-len 600"):
        check_server(config, long)


def break_down(what: str, server: VllmServer, folder: Path) -> None:
    """Make the fourth update fail, in the process that trains."""
    if what == "killed server":
        for pid in server.pids():  # but for the one that removes their shared memory, and then ends
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    elif what == "full disk":
        with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    else:  # the trainer dies when the response that proves the weights comes
        VllmEngine.read = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign,return-value]


@pytest.mark.parametrize(
    ("what", "says", "step"),
    [
        ("killed trainer", "", 2), ("full disk", "No space left on device", 2),
        pytest.param("killed server", "continues from the checkpoint", 3, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_an_interrupted_run_resumes_to_the_same_bytes(
    served: Any, undisturbed: Path, digests: Any, tmp_path: Path, capfd: Any, what: str, says: str, step: int
) -> None:
    stages, server = served
    (small := tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]
    if what == "full disk" and subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    rollout = server.config(folder=str(small))

    def breaking(step: int, metrics: Any, **_: Any) -> None:
        if step == 3:
            break_down(what, server, small)

    try:
        trainer = Forked(target=lambda: stages.run("ppo", tmp_path, breaking, rollout=rollout))
        trainer.start()
        trainer.join(PATIENCE * 120)
        assert trainer.exitcode == (1 if says else -signal.SIGKILL) and says in capfd.readouterr().err
        kept = load_latest(tmp_path / "checkpoint" / "ppo")
        assert kept is not None and kept.step == step and len(list(small.iterdir())) == (what != "killed server")
        (small / "filler").unlink(missing_ok=True)
        if what == "killed server":
            server.kill()
            server.start()
        stages.run("ppo", tmp_path, rollout=rollout)
        assert digests(tmp_path / "artifact") == digests(undisturbed / "artifact") and not list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=what == "full disk", capture_output=True)


@pytest.mark.long
def test_the_proof_stops_a_tied_model_on_a_cpu(stages: Any, runtime: Runtime, tmp_path: Path) -> None:
    """vLLM for GPUs replaces it, and the run ends well there."""
    made = of_heads_for_a_cpu(stages, runtime, tmp_path, tied=True)
    server = VllmServer(made.inputs["sft"] / "model", tmp_path)
    try:
        server.start()
        with VllmClient(server.config()) as client:
            device = client.get("/server_info", config_format="json")["vllm_config"]["device_config"]["device"]
        stale = pytest.raises(UserError, match=r"does not sample from the weights .*-1\).*tie_word_embeddings false")
        with stale if device == "cpu" else nullcontext():
            made.run("ppo", tmp_path / "ppo", rollout=server.config(), updates=2)
    finally:
        server.stop()
