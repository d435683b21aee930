"""Who is taken for alive where a note about a process is damaged."""

from components.base.process import is_alive, this_process


def test_a_note_without_an_id_or_start_names_no_living_process() -> None:
    whole = this_process()
    assert is_alive(whole)
    for missing in ("pid", "started"):
        note = {name: value for name, value in whole.items() if name != missing}
        assert not is_alive(note)  # type: ignore[arg-type]


def test_a_process_of_an_earlier_boot_is_over_and_one_elsewhere_is_not_seen() -> None:
    me = this_process()
    assert not is_alive({**me, "started": "1"})
    assert not is_alive({**me, "boot": "another"})
    assert is_alive({**me, "pid_namespace": "pid:[1]"}) and is_alive({**me, "host": "another"})
