"""Sheets on their way to the raters and back: what a run's folder gets for them, and their answers in one file."""

from collections.abc import Sequence
from pathlib import Path

from components.base.errors import UserError
from components.base.files import make_folder, replacing, write_whole
from components.human_eval.labels import Sample
from components.human_eval.results.seconds import as_cells, read_seconds
from components.human_eval.sheet import RATERS
from components.store.store import ArtifactStore, Record

LABELS = "labels.csv"
"""What raters answered, in a run's folder."""
_KINDS = (".csv", ".tsv", ".txt", ".json", ".jsonl")


def give_out(sample: Path, folder: Path) -> None:
    """Copy the sheet and the raters' own files of a sample artifact into a run's folder.

    What is there stays: the files of a run that is taken up again may hold answers by now.
    """
    own = sorted((sample / RATERS).glob("*.csv"))
    for source, copy in [(sample / "sheet.csv", folder / "sheet.csv"), *((o, folder / RATERS / o.name) for o in own)]:
        if not copy.exists():
            make_folder(copy.parent)
            write_whole(copy, source.read_bytes())


def joined(folder: Path, store: ArtifactStore, sample: Record | None, sheets: Path | Sequence[Path]) -> Path:
    """Check what raters returned, and write their answers as one sheet, `labels.csv`, into a run's folder.

    The same answers give the same bytes, in whatever files they came, and so the same key.

    Returns:
        That file; the one given file itself where the store has lost the sample, which the stage then makes again.

    Raises:
        UserError: there is no such file. Mistakes: as `Sample.ratings`.
    """
    files = [file for path in ([sheets] if isinstance(sheets, Path) else sheets) for file in _files(path)]
    artifact = None if sample is None else store.path(sample)
    if artifact is None or not (artifact / "sheet.json").is_file():
        if len(files) == 1:
            return files[0]
        raise UserError(
            "the sample that these sheets were made of is not whole in the store any more, so they can't be joined. "
            "Rerun human_eval, which makes it again."
        )
    opened = Sample.open(artifact)
    labels = opened.ratings(*files)
    seconds = read_seconds(files, opened.raters)
    further = {item: as_cells(seconds, item, opened.raters) for item in labels} if seconds else None
    with replacing(folder / LABELS) as temporary:
        opened.write(temporary, labels, further)
    return folder / LABELS


def _files(path: Path) -> list[Path]:
    """A returned file, or those of a folder."""
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix.lower() in _KINDS and each.name[0] not in ".~")
        if found:
            return found
        raise UserError(f"{path}: the folder holds no sheet ({', '.join(_KINDS)}). Give the raters' filled files.")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file. Give the filled rating sheet (CSV or JSONL).")
    return [path]
