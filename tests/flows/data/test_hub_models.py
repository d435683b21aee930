"""A model of the hub: one commit, looked up once, from a stand-in hub on loopback that serves a tiny random model."""

import json
import shutil
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from components.base.errors import UserError
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, load_base, load_reward_model, save_model
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.rewards.config import ModelReward
from components.rewards.model import ModelSource
from components.rewards.source import Replies
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from flows.data.hub_models import hub_model
from flows.data.pretrained import find_base, pinned_base
from flows.data.reward_sources import reward_model, settled_rewards
from flows.launch.begin import new_run, rerun
from flows.sources import find_sources
from tasks.runs.config import run_values

FIRST, SECOND = "1" * 40, "2" * 40


class Hub:
    """Serves the folders of `commits`, of which `branches` name some, as huggingface.co does."""

    def __init__(self) -> None:
        self.commits: dict[str, Path] = {}
        self.branches: dict[str, str] = {}
        self.asked: list[str] = []
        self.status = 200

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        """Answer a request for the repository `lab/tiny`; of any other say that there is none."""
        path = handler.path.partition("?")[0]
        self.asked.append(path)
        data, headers = b"", {}
        status = self.status
        if path.startswith("/api/models/lab/tiny/revision/"):
            revision = path.rpartition("/")[2]
            commit = self.branches.get(revision, revision)
            status = status if commit in self.commits else 404
            headers = {} if commit in self.commits else {"X-Error-Code": "RevisionNotFound"}
            data = json.dumps({"id": "lab/tiny", "sha": commit, "siblings": []}).encode()
        elif path.startswith("/api/models/lab/tiny/tree/"):
            folder = self.commits[path.split("/")[6]]
            entries = [self.entry(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()]
            data = json.dumps(entries).encode()
        elif path.startswith("/lab/tiny/resolve/"):
            commit, name = path.removeprefix("/lab/tiny/resolve/").split("/", 1)
            data = (self.commits[commit] / name).read_bytes()
            headers = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)

    @staticmethod
    def entry(file: Path, folder: Path) -> dict[str, object]:
        """A file in a listing."""
        data = file.read_bytes()
        name = file.relative_to(folder).as_posix()
        return {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, with files beside it that are not to be read."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer(["Hello there , how are you ?"], 300)
    shape = ScratchModel(hidden_size=16, layers=1, heads=2, vocabulary=300)
    save_model(build_causal_lm(shape, tokenizer, 64, seed=1), tokenizer, folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another")
    return folder


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, which huggingface_hub takes for the hub, and a cache of its own."""
    found = Hub()
    found.commits, found.branches = {FIRST: tiny}, {"main": FIRST}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.answer(self, body=True)

        def do_HEAD(self) -> None:
            found.answer(self, body=False)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield found
    server.shutdown()
    server.server_close()


def moved(hub: Hub, tiny: Path, folder: Path) -> None:
    """Have `main` name another commit: the same weights and another README, but for one config."""
    shutil.copytree(tiny, folder)
    changed = next(path for path in (folder / "generation_config.json", folder / "config.json") if path.exists())
    changed.write_text(json.dumps({**json.loads(changed.read_text()), "temperature": 0.5}))
    hub.commits[SECOND], hub.branches["main"] = folder, SECOND


def config(*changes: str) -> RunConfig:
    return load_config("tiny", [parse_override(text) for text in changes]).resolved()


def test_a_name_becomes_a_commit_once_and_reruns_take_the_pin(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    launch = new_run(home, "tiny", config("sft.base=lab/tiny"))
    assert launch.notes[0] == f"sft.base: lab/tiny is now commit {FIRST}"
    assert run_values(home, launch.ctx.run)["sft"]["base"] == f"lab/tiny@{FIRST}"  # type: ignore[index, call-overload]
    given = launch.sources.base["base"]
    assert given.path.name == f"lab--tiny@{FIRST}"
    launch.ctx.finish()

    moved(hub, tiny, tmp_path / "second")
    asked = len(hub.asked)
    pinned = launch.config
    assert find_sources(pinned, home).base["base"] == given and len(hub.asked) == asked, "a commit asks no network"
    again = rerun(home, "validate", launch.ctx.run)
    assert again.config.sft.base == f"lab/tiny@{FIRST}" and again.sources.base["base"].digest == given.digest
    again.ctx.finish()
    later = new_run(home, "tiny", config("sft.base=lab/tiny@main"))
    assert later.config.sft.base == f"lab/tiny@{SECOND}" and later.sources.base["base"].digest != given.digest
    later.ctx.finish()


def test_the_folder_has_weights_config_and_tokenizer_alone_and_loads(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    name, folder = hub_model("lab/tiny", tmp_path / "home")
    files = {path.name for path in folder.rglob("*")}
    assert files == {path.name for path in tiny.iterdir()} - {"pytorch_model.bin", "onnx"} | {"hub.json"}
    assert json.loads((folder / "hub.json").read_text()) == {"repository": "lab/tiny", "commit": FIRST}
    assert not any(path.endswith(("pytorch_model.bin", "onnx/model.safetensors")) for path in hub.asked)
    loaded, direct = load_base(folder)[0].state_dict(), load_base(tiny)[0].state_dict()
    assert all(torch.equal(loaded[key], weight) for key, weight in direct.items()) and loaded.keys() == direct.keys()
    assert find_base(name, tmp_path / "home") == folder


def test_the_same_files_of_two_commits_are_two_inputs(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "second")
    hub.commits[SECOND] = tmp_path / "second"
    one, two = (find_sources(config(f"sft.base=lab/tiny@{commit}"), tmp_path) for commit in (FIRST, SECOND))
    assert one.base["base"].digest != two.base["base"].digest


def test_offline_takes_what_is_in_the_cache_and_else_says_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"sft\.base = lab/tiny: .* \(HF_HUB_OFFLINE\), first fill .* by `hf download`"):
        pinned_base(config("sft.base=lab/tiny"), tmp_path / "home")
    assert not hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_model("lab/tiny", tmp_path / "home")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert pinned_base(config("sft.base=lab/tiny"), tmp_path / "other")[0].sft.base == f"lab/tiny@{FIRST}"
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("lab/none", r"no such folder, and .*/lab/none can't be downloaded \(RepositoryNotFoundError\): .* HF_TOKEN"),
        ("lab/tiny@v9", r"\(RevisionNotFoundError\): .* Check the name, the revision and"),
        ("lab/none.gguf", r"there is no such folder .*, a model of the hub as org/name@revision"),
    ],
)
def test_a_name_that_the_hub_does_not_have_is_the_users_mistake(
    hub: Hub, tmp_path: Path, name: str, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        new_run(tmp_path / "home", "tiny", config(f"sft.base={name}"))
    assert not (tmp_path / "home" / "runs").exists()


def test_a_repository_without_safetensors_is_refused(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickle"
    folder.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copyfile(tiny / name, folder / name)
    hub.commits[SECOND] = folder
    with pytest.raises(UserError, match=rf"commit {SECOND} has no safetensors file\. .* download a GGUF file"):
        hub_model(f"lab/tiny@{SECOND}", tmp_path / "home")


def test_a_gated_model_or_a_hub_that_is_away_says_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gated(handler: BaseHTTPRequestHandler, body: bool) -> None:
        handler.send_response(403)
        handler.send_header("X-Error-Code", "GatedRepo")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(hub, "answer", gated)
    with pytest.raises(UserError, match=r"\(GatedRepoError\): .* gated model accept its terms .* set HF_TOKEN"):
        hub_model("lab/tiny", tmp_path / "home")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/lab/tiny can't be downloaded .* and the network;"):
        hub_model("lab/tiny", tmp_path / "home")


@pytest.fixture(scope="module")
def classifier(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with one label on the tiny model, with a pickle beside it."""
    folder = tmp_path_factory.mktemp("classifier")
    model, tokenizer = load_reward_model(tiny, Runtime(device="cpu", dtype="float32", threads=1), seed=2)
    save_model(model, tokenizer, folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


JUDGED_BY_HUB = 'ppo.rewards=[{source: pipeline}, {source: "model:lab/tiny@main", name: outsider}]'


def test_a_reward_model_of_the_hub_becomes_a_commit_which_the_run_keeps(
    hub: Hub, classifier: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    hub.commits[FIRST] = classifier
    launch = new_run(home, "tiny", config(JUDGED_BY_HUB))
    assert f"ppo.rewards: model:lab/tiny@main is now lab/tiny@{FIRST}" in launch.notes
    stored = run_values(home, launch.ctx.run)["ppo"]["rewards"][1]["source"]  # type: ignore[index, call-overload]
    assert stored == f"model:lab/tiny@{FIRST}"
    given = launch.sources.rewards["rewards/outsider"]
    assert given.path.name == f"lab--tiny@{FIRST}" and not (given.path / "pytorch_model.bin").exists()
    launch.ctx.finish()

    moved(hub, classifier, tmp_path / "second")
    asked = len(hub.asked)
    assert find_sources(launch.config, home).rewards["rewards/outsider"] == given
    assert len(hub.asked) == asked, "a commit asks no network"
    again = rerun(home, "validate", launch.ctx.run)
    assert again.sources.rewards["rewards/outsider"] == given and len(hub.asked) == asked
    again.ctx.finish()
    later = new_run(home, "tiny", config(JUDGED_BY_HUB))
    assert later.config.ppo.rewards is not None and later.config.ppo.rewards[1].source == f"model:lab/tiny@{SECOND}"
    assert later.sources.rewards["rewards/outsider"].digest != given.digest, "PPO's key depends on the commit"
    later.ctx.finish()


def test_a_reward_model_of_the_hub_scores_as_transformers_own_forward(
    hub: Hub, classifier: Path, tmp_path: Path
) -> None:
    hub.commits[FIRST] = classifier
    settled, _ = settled_rewards(config(JUDGED_BY_HUB), tmp_path / "home")
    assert settled.ppo.rewards is not None
    named = settled.ppo.rewards[1]
    assert isinstance(named, ModelReward)
    source = ModelSource(named, reward_model(named, tmp_path / "home")[1], config().runtime)
    prompt = [{"role": "user", "content": "Hello there , how are you ?"}]
    scores = source.score(Replies([prompt, prompt], ["Hello", "you are"], [{}, {}]))
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    for score, text in zip(scores, ("Hello", "you are"), strict=True):
        whole = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": text}], tokenize=False)
        with torch.no_grad():
            own = model(**tokenizer(whole, add_special_tokens=False, return_tensors="pt")).logits.item()
        assert abs(score - own) <= 1e-4
    assert scores[0] != scores[1]


def test_a_reward_model_that_the_hub_does_not_give_is_named_by_its_option(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 'ppo.rewards=[{source: "model:lab/none"}]'
    with pytest.raises(UserError, match=r"^ppo\.rewards: source = lab/none: .*RepositoryNotFoundError"):
        new_run(tmp_path / "home", "tiny", config(asked))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^ppo\.rewards: source = lab/tiny@main: .*HF_HUB_OFFLINE"):
        new_run(tmp_path / "home", "tiny", config(JUDGED_BY_HUB))
    assert not (tmp_path / "home" / "runs").exists()


@pytest.mark.parametrize("asked", [f"lab/tiny@{SECOND}", "lab/tiny"])
def test_a_hub_that_answers_another_commit_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    def other(*_: object, **__: object) -> str:
        return str(tmp_path / "snapshots" / FIRST)  # the files' own commit is another, so this folder is not there

    monkeypatch.setattr("huggingface_hub.snapshot_download", other)
    with pytest.raises(UserError, match=rf"sft\.base = {asked}: the hub answered with another commit \({FIRST}"):
        hub_model(asked, tmp_path / "home")
