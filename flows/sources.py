"""What a run starts from and no stage made: data files, a pretrained model, people's filled sheet."""

from dataclasses import dataclass, field
from pathlib import Path

from components.data.hub import resolve_source
from components.errors import UserError
from data_contracts.gather import look_at
from flows.config import RunConfig
from flows.fetch import MODELS, model_folder
from tasks.result import Source


@dataclass(frozen=True)
class Sources:
    """The inputs of a run, digested."""

    data: dict[str, Source] = field(default_factory=dict)
    """`preferences`, `demonstrations`, `prompts`, where the config names them; else the built-in task is generated."""
    base: dict[str, Source] = field(default_factory=dict)
    """`base`, the pretrained model's folder, where the config names one."""
    sheet: Source | None = None
    """The ratings that people filled in."""


def find_sources(config: RunConfig, home: Path, sheet: Path | None = None) -> Sources:
    """Find and digest what `config` names; relative paths are relative to the current directory.

    Raises:
        UserError: something is not there or can't be read, or a data file holds not one valid row.
    """
    data = {}
    for name in ("preferences", "demonstrations", "prompts"):
        value = getattr(config.data, name)
        if value is not None:
            path = resolve_source(value, config.data.hub, home / "datasets", f"data.{name}")
            if path.is_file():
                look_at(name, path, config.data)
            data[name] = Source.of(path)
    base = {} if config.sft.base is None else {"base": Source.of(find_base(config.sft.base, home))}
    if sheet is not None and not sheet.is_file():
        raise UserError(f"{sheet}: there is no such file. Give the filled rating sheet (CSV or JSONL).")
    return Sources(data, base, None if sheet is None else Source.of(sheet))


def find_base(base: str, home: Path) -> Path:
    """The folder of the pretrained model that `sft.base` names. Raises `UserError` if there is none."""
    folder = Path(base).expanduser()
    if folder.is_dir():
        return folder
    if base in MODELS:
        fetched = model_folder(base, home)
        if fetched.is_dir():
            return fetched
        raise UserError(f"sft.base = {base}: it is not here yet. Run `tether fetch {base}` first.")
    raise UserError(
        f"sft.base = {base}: there is no such folder (looked for {folder.absolute()}). Give the folder of a Hugging "
        f"Face or GGUF model, or the name of a fetched one ({', '.join(MODELS)})."
    )
