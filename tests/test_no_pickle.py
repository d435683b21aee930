"""No pickle is ever read: not by us, and not by a library on our behalf."""

import ast
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import TetherError, UserError
from components.base.hashing import digest_file
from components.data.config import DataConfig
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, load_base, load_causal_lm, load_reward_model, save_model
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.store.archive import read_archive
from components.store.store import ArtifactStore, Miss
from components.training.checkpoint import load_latest
from data_contracts.rows.gather import look_at

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path for name in ("components", "data_contracts", "tasks", "flows") for path in (ROOT / name).rglob("*.py")
)

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load", "pd.read_pickle",
    "pandas.read_pickle", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip
FORBIDDEN_NAMES = {"read_pickle", "to_pickle", "load_model", "unpickle"}
"""Also as attributes of whatever: `mlflow.*.load_model` unpickles most flavours."""
FORBIDDEN_OPTIONS = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False, "use_safetensors": False}
LOADER = ROOT / "components/models/weights.py"
"""The one module that may call `from_pretrained`."""


def problems(text: str) -> list[str]:
    """What in a module's source could read a pickle."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained":
            found.append(ast.unparse(node))
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_NAMES:
            found.append(name)
        options = {each.arg: each.value for each in node.keywords}
        for option, value in FORBIDDEN_OPTIONS.items():
            if option in options and ast.unparse(options[option]) == str(value):
                found.append(f"{name}({option}={value})")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_reads_a_pickle(path):
    found = problems(path.read_text())
    assert set(found) == ({"auto.from_pretrained"} if path == LOADER else set())


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from joblib import load", "import torch; torch.load(x)", "np.load(x, allow_pickle=True)",
     "x.read_pickle(y)", "mlflow.pyfunc.load_model(x)", "yaml.unsafe_load(x)", "f(trust_remote_code=True)",
     "AutoTokenizer.from_pretrained(x)", "functools.partial(AutoModel.from_pretrained, x)"],
)  # fmt: skip
def test_the_scan_sees_what_it_looks_for(text):
    assert problems(text)


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def bomb(tmp_path, monkeypatch) -> Callable[[Path], None]:
    """`bomb(path)` plants one; afterwards none has gone off, and nothing has even looked at a pickle."""
    read: list[str] = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: read.append(str(args[0])) or real(*args, **kwargs))
    monkeypatch.setattr(pickle, "load", lambda *args, **kwargs: read.append("pickle.load"))
    monkeypatch.setattr(pickle, "loads", lambda *args, **kwargs: read.append("pickle.loads"))

    def plant(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))

    yield plant
    assert read == []
    assert not (tmp_path / "exploded").exists()


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A small model with its tokenizer, as an artifact holds it."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = train_tokenizer(["my order is late what can you do"], 300)
    save_model(build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 64, 0), tokenizer, folder)
    return folder


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "artifact" / "model"))


RUNTIME = Runtime(device="cpu", dtype="float32", threads=1, instruction_set="default")
LOADERS: dict[str, Callable[[Path], Any]] = {
    "base": load_base,
    "policy": lambda folder: load_causal_lm(folder.parent, RUNTIME),
    "reward": lambda folder: load_reward_model(folder.parent, RUNTIME),
    "reward from sft": lambda folder: load_reward_model(folder.parent, RUNTIME, seed=0),
}
"""Every way in which a model's folder is loaded."""


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00001.bin"])
def test_a_folder_whose_weights_are_a_pickle_is_refused(model, bomb, loader, name):
    (model / "model.safetensors").unlink()
    bomb(model / name)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="safetensors"):
        LOADERS[loader](model)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("shard", ["shard.bin", "../shard.bin", "../outside.safetensors"])
def test_an_index_that_names_a_pickle_as_a_shard_is_refused(model, bomb, loader, shard):
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    bomb(model / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": shard}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json"):
        LOADERS[loader](model)


@pytest.mark.parametrize("loader", LOADERS)
def test_an_adapter_beside_the_model_is_refused(model, bomb, loader):
    bomb(model / "adapter_model.bin")
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}))
    with pytest.raises(UserError, match="adapter"):
        LOADERS[loader](model)


@pytest.mark.parametrize("loader", LOADERS)
def test_pickles_beside_safetensors_are_not_looked_at(model, bomb, loader):
    for name in "pytorch_model.bin training_args.bin optimizer.pt vocab.pkl tokenizer.pkl scheduler.pt".split():
        bomb(model / name)
    if loader == "reward":
        save_model(*LOADERS["reward from sft"](model), model)
    assert LOADERS[loader](model)


def test_weights_that_are_a_pickle_under_a_safetensors_name_are_refused(model, bomb):
    bomb(model / "model.safetensors")
    with pytest.raises(UserError):
        LOADERS["base"](model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_a_pickle_is_refused(model, bomb, name):
    bomb(model / name)
    for loader in LOADERS:
        with pytest.raises(Exception):  # noqa: B017 (the library's own, or ours; the bomb is what is tested)
            LOADERS[loader](model)


def test_code_that_a_folder_brings_is_not_run_and_nobody_is_asked(model, tmp_path, monkeypatch):
    (model / "evil.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')\nclass Evil: pass\n")
    for name, key in (("config.json", "AutoModelForCausalLM"), ("tokenizer_config.json", "AutoTokenizer")):
        config = json.loads((model / name).read_text())
        config["auto_map"] = {key: "evil.Evil" if key != "AutoTokenizer" else ["evil.Evil", "evil.Evil"]}
        (model / name).write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    LOADERS["policy"](model)
    LOADERS["base"](model)
    assert not (tmp_path / "exploded").exists() and "evil" not in sys.modules


def test_a_pickle_in_a_checkpoints_place_is_no_checkpoint(bomb, tmp_path):
    folder = tmp_path / "checkpoint"
    bomb(folder / "step-000000001.safetensors")
    bomb(folder / "step-000000002.json")
    bomb(folder / "step-000000003.pt")
    document = {"step": 1, "tensors_sha256": digest_file(folder / "step-000000001.safetensors"), "state": {}}
    (folder / "step-000000001.json").write_text(json.dumps(document))
    assert load_latest(folder) is None


def test_a_pickle_in_the_stores_place_of_a_record_manifest_or_archive_is_refused(bomb, tmp_path):
    store = ArtifactStore(tmp_path / "home")
    bomb(store.local.root / "records" / ("a" * 64) / "1.toy.json")
    assert isinstance(store.lookup("a" * 64), Miss)
    bomb(store.objects / "manifest")
    digest = digest_file(store.objects / "manifest")
    (store.objects / "manifest").rename(store.objects / digest)
    with pytest.raises(TetherError):
        store.path(digest)
    bomb(tmp_path / "run.tar")
    with pytest.raises(UserError):
        read_archive(tmp_path / "run.tar")


@pytest.mark.parametrize("name", ["data.pkl", "data.jsonl", "data.parquet", "data.csv"])
def test_a_pickle_given_as_data_runs_nothing(bomb, tmp_path, name):
    bomb(tmp_path / name)
    with pytest.raises(UserError, match=name):
        look_at("preferences", tmp_path / name, DataConfig())
