"""A long list in chunks: what is on disk and whole isn't computed again, what is damaged is."""

import logging
from pathlib import Path

import pytest

from components.training.chunks import in_chunks


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data.replace(b'"n": 2', b'"n": 7'), lambda _: b""]
)
def test_a_damaged_chunk_is_computed_again_and_said(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    computed: list[int] = []

    def compute(chunk, start):
        computed.append(start)
        return [{"n": n} for n in chunk]

    def go():
        return in_chunks(range(6), 2, tmp_path / "c", compute, lambda done: None)

    rows = [{"n": n} for n in range(6)]
    assert go() == rows == go()
    assert computed == [0, 2, 4]
    file = tmp_path / "c-000002.json"
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert go() == rows
    assert computed == [0, 2, 4, 2] and "c-000002.json is damaged" in caplog.text
