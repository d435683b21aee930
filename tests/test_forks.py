"""What an earlier test left behind doesn't fail those that fork."""

import threading

import pytest
import torch

from tests.forks import Forked


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_a_forked_process_ends_as_its_target_did_whatever_is_registered_for_the_exit(
    monkeypatch: pytest.MonkeyPatch, works: bool, code: int
) -> None:
    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(threading, "_threading_atexits", [fail])  # as Prefect does
    process = Forked(target=(lambda: None) if works else fail)
    process.start()
    process.join()
    assert process.exitcode == code


def test_a_test_that_forks_beside_a_gpu_is_skipped_and_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(pytest.skip.Exception, match="GPU"):
        Forked(target=print).start()
