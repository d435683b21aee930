from pathlib import Path

from tasks.runs.awaited_labels import PROGRESS, LabelProgress, read_progress, write_progress


def test_progress_is_complete_only_when_no_label_is_missing_and_never_rounds_up_to_that() -> None:
    nearly = LabelProgress(1535, 1536)
    assert nearly.text == "1535 of 1536 labels (99 %)" and not nearly.complete
    assert LabelProgress(1536, 1536).complete and LabelProgress(1536, 1536).text.endswith("(100 %)")
    assert not LabelProgress(0, 0).complete and LabelProgress(0, 0).share == 0


def test_what_was_kept_reads_back_and_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    said = LabelProgress(5, 12, "https://review.example/", {"rater 1": (5, 6), "<b>": (0, 6)})
    assert read_progress(tmp_path) is None
    write_progress(tmp_path, said)
    assert read_progress(tmp_path) == said
    for damage in (b"", b"{", b'{"answered": "many"}'):
        (tmp_path / PROGRESS).write_bytes(damage)
        assert read_progress(tmp_path) is None
