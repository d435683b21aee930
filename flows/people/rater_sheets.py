"""Give sheets out to raters in a run's folder, and join the returned answers in one file."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from components.base.errors import UserError
from components.base.files import make_folder, replacing, write_whole
from components.base.paths import user_text
from components.human_eval.config import HumanEvalConfig
from components.human_eval.returned_labels import Sample
from components.human_eval.sheet import GUIDELINES_FILE, RATERS
from flows.config.run_config import RunConfig

LABELS = "labels.csv"
"""The joined answers of all raters, in a run's folder."""


_KINDS = (".csv", ".tsv", ".txt", ".json", ".jsonl")


def with_guidelines(config: RunConfig) -> RunConfig:
    """Return `config` with the text of the file `human_eval.guidelines` as its `instructions`, so that the run keeps
    it.

    Raises:
        UserError: the file can't be read, is not UTF-8 text, or is empty or too long.
    """
    field, file = "human_eval.guidelines", config.human_eval.guidelines
    if file is None:
        return config
    text = user_text(file, field)
    try:
        values = config.human_eval.model_dump() | {"instructions": text, "guidelines": None}
        return config.model_copy(update={"human_eval": HumanEvalConfig.model_validate(values)})
    except ValidationError as error:
        raise UserError(f"{field} = {file}: {error.errors()[0]['msg']}.") from error


def give_out(sample: Path, folder: Path) -> None:
    """Copy the sheet, the guidelines and the raters' own files of a sample artifact into a run's folder.

    Existing files are not replaced, because in a continued run they may already hold answers.
    """
    rater_files = sorted((sample / RATERS).glob("*.csv"))
    common_files = [(sample / name, folder / name) for name in ("sheet.csv", GUIDELINES_FILE)]
    for source, copy in [*common_files, *((file, folder / RATERS / file.name) for file in rater_files)]:
        if not copy.exists():
            make_folder(copy.parent)
            write_whole(copy, source.read_bytes())


def joined(folder: Path, sample: Path | None, sheets: Path | Sequence[Path]) -> Path:
    """Check what raters returned, and write their answers as one sheet, `labels.csv`, into a run's folder.

    The same answers give the same bytes and the same key, whatever files they come from.

    Args:
        sample: the folder of the sample's artifact.

    Returns:
        The path of that file. If the sample is missing in the store and only one file is given, that file.

    Raises:
        UserError: there is no such file, or several files are given and the sample is missing in the store.
        Mistakes: as `Sample.ratings`.
    """
    files = [file for path in ([sheets] if isinstance(sheets, Path) else sheets) for file in files_of(path)]
    if sample is None or not (sample / "sheet.json").is_file():
        if len(files) == 1:
            return files[0]
        raise UserError(
            "the sample of these sheets is no longer complete in the store, so the sheets can't be joined. "
            "Rerun human_eval to compute it again."
        )
    opened = Sample.open(sample)
    answers = opened.answers(*files)
    with replacing(folder / LABELS) as temporary:
        opened.write(temporary, answers)
    return folder / LABELS


def files_of(path: Path) -> list[Path]:
    """Return a returned file, or the files of a folder of them. Raises UserError if there is none."""
    if path.is_dir():
        sheets = sorted(file for file in path.iterdir() if file.suffix.lower() in _KINDS and file.name[0] not in ".~")
        if sheets:
            return sheets
        raise UserError(f"{path}: the folder has no sheet ({', '.join(_KINDS)}). Give the raters' filled files.")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file. Give the filled rating sheet (CSV or JSONL).")
    return [path]
