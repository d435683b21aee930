"""Hugging Face hub models: resolve a name to a commit before a run's first key, and the commit to a folder."""

import os
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from components.base.errors import UserError, disk_error
from components.base.files import whole_folder
from components.base.jsonl import write_json

FILES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "vocab.*",
    "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
"""Files that are downloaded from a repository: safetensors weights, configs and the tokenizer."""
WHENCE = "hub.json"
"""A file in the model's folder that names repository and commit, so that the folder's digest and every key depend on
them."""

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_name(text: str) -> bool:
    """Return whether `text` has the form of a hub model: `org/name` or `org/name@revision`."""
    return _NAME.fullmatch(text) is not None


def hub_model(name: str, home: Path, field: str = "sft.base") -> tuple[str, Path]:
    """Download a hub model into a folder below `home`. The files are hard links into huggingface_hub's cache, or copies
    if the cache is on another disk.

    Args:
        name: `org/name`, or `org/name@revision` with a branch, tag or commit. A commit that is already below `home`
            needs no network.
        home: the Tether home.
        field: the option that gives the name, for errors.

    Returns:
        `org/name@commit`, and its folder.

    Raises:
        UserError: there is no such model or revision, it has no safetensors file, or the download fails.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    repo, revision = match["repo"], match["revision"]
    if revision is not None and _COMMIT.fullmatch(revision) and (downloaded := _folder(repo, revision, home)).is_dir():
        return name, downloaded
    snapshot = _download(repo, revision, f"{field} = {name}")
    commit = snapshot.name
    other = revision is not None and _COMMIT.fullmatch(revision) and commit != revision
    if other or not snapshot.is_dir():  # the files that came say that they are of another commit
        raise UserError(
            f"{field} = {name}: the hub answered with another commit ({commit} for its files' list), so it is not "
            "known which model that is. Try again, or download the model and give its folder."
        )
    folder = _folder(repo, commit, home)
    files = [path for path in sorted(snapshot.iterdir()) if any(fnmatch(path.name, pattern) for pattern in FILES)]
    if not any(path.suffix == ".safetensors" for path in files):
        raise UserError(
            f"{field} = {name}: commit {commit} has no safetensors file. Tether reads no other weights from the hub. "
            f"Convert it to safetensors, or download a GGUF file and give its path."
        )
    try:
        with whole_folder(folder) as draft:
            for path in files:
                try:
                    os.link(path.resolve(), draft / path.name)
                except OSError:  # another disk
                    shutil.copyfile(path.resolve(), draft / path.name)
            write_json(draft / WHENCE, {"repository": repo, "commit": commit})
    except OSError:
        if not folder.is_dir():  # otherwise the folder existed, or another process was faster
            raise
    return f"{repo}@{commit}", folder


def _folder(repo: str, commit: str, home: Path) -> Path:
    return home / "models" / f"{repo.replace('/', '--')}@{commit}"


def _download(repo: str, revision: str | None, named: str) -> Path:
    """Return the snapshot's folder in huggingface_hub's cache; its name is the commit. Raises as `hub_model` does."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(FILES), ignore_patterns="*/*"))
    except Exception as error:  # any exception of its transports and parsers, or of the disk
        if disk_error(error):
            raise
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise UserError(
            f"{named}: there is no such folder, and {constants.ENDPOINT}/{repo} can't be downloaded "
            f"({type(error).__name__}): {reason.rstrip('.')}. Check the name, the revision and the network; for a "
            "private or gated model accept its terms on its page and set HF_TOKEN (or `hf auth login`). Without a "
            f"network (HF_HUB_OFFLINE), first fill {constants.HF_HUB_CACHE} by `hf download`, or give a folder."
        ) from error
