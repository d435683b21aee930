"""Who is taken for alive where a note about a process is damaged."""

from components.base.process import is_alive, is_dead, this_process


def test_a_note_without_an_id_or_start_names_no_living_process() -> None:
    whole = this_process()
    assert is_alive(whole) and not is_dead(whole)
    for missing in ("pid", "started"):
        note = {name: value for name, value in whole.items() if name != missing}
        assert not is_alive(note) and is_dead(note)  # type: ignore[arg-type]
