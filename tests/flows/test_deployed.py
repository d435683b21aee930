"""The flows of a Prefect server where no server is needed. (With one: tests/test_operations.py.)"""

from flows import deployed
from flows.config import load_config


def test_a_run_to_go_on_from_without_the_stage_is_the_users_mistake() -> None:
    state = deployed.rlhf.fn(load_config("tiny"), from_run="20261122-001155-ab12")
    assert (state.name, state.is_failed()) == ("UserError", True)
    assert state.message == "from_run = 20261122-001155-ab12: name the stage too, with from_stage."
