"""What a worker accepts as an order, and how it says what differs. (The servers' side: tests/test_operations.py.)"""

from pathlib import Path

import pytest

from components.base.errors import MachineMismatch
from components.keys.fingerprint import stage_key
from components.models.runtime import Runtime
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from tasks.execution import computing, dispatch
from tasks.execution.dispatch import Order, receive
from tasks.result import Input
from tasks.stages import STAGES

STAGE = STAGES["validate"]


@pytest.fixture
def source(tmp_path: Path) -> Input:
    file = tmp_path / "pairs.jsonl"
    file.write_text("{}\n")
    return Input.of(file)


def order(source: Input, **changes) -> Order:
    job = load_config("tiny").resolved().stage_job(STAGE)
    inputs = {"preferences": source.digest}
    key, parts = stage_key(STAGE.name, job, inputs, STAGE.module, STAGE.libraries)
    fields = {
        "stage": STAGE.name,
        "key": key,
        "run": "r",
        "job": job.model_dump(mode="json"),
        "inputs": {"preferences": source},
        "parts": parts,
    }
    return Order.model_validate({**fields, **changes})


def never(*_: object) -> None:
    raise AssertionError("nothing was to be computed or said")


def publish(store: ArtifactStore, key: str, tmp_path: Path) -> str:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "pairs.txt").write_text("kept")
    return store.publish(key, folder, None, {"stage": "validate"}).digest


def test_an_order_whose_result_is_stored_by_now_computes_nothing(
    source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = ArtifactStore(tmp_path / "home"), order(source)
    digest = publish(store, wanted.key, tmp_path)
    monkeypatch.setattr(computing, "compute", never)
    assert receive(wanted, store, never, never).digest == digest
    with pytest.raises(AssertionError, match="computed"):
        receive(order(source, refresh=True), store, never, lambda text: None)


def test_an_order_survives_the_way_over_the_server(source: Input) -> None:
    wanted = order(source)
    assert Order.model_validate_json(wanted.model_dump_json()) == wanted


def test_a_worker_with_other_code_or_libraries_refuses_and_names_them(source: Input, tmp_path: Path) -> None:
    parts = order(source).parts
    theirs = {**parts, "libraries": {**parts["libraries"], "pandas": "1.0"}}
    theirs["source"] = {**parts["source"], "data_contracts.validate": "0" * 64}
    with pytest.raises(MachineMismatch) as refused:
        receive(order(source, key="f" * 64, parts=theirs), ArtifactStore(tmp_path / "home"), never, never)
    assert "library pandas 1.0 -> " in str(refused.value)
    assert "data_contracts/validate.py changed" in str(refused.value)
    assert not (tmp_path / "home").exists()


def test_a_worker_that_sees_other_bytes_under_a_path_refuses(source: Input, tmp_path: Path) -> None:
    wanted = order(source)
    source.path.write_text("{ }\n")
    with pytest.raises(MachineMismatch, match=r"pairs\.jsonl holds other bytes"):
        receive(wanted, ArtifactStore(tmp_path / "home"), never, never)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cuda"}, "device: wanted cuda, here cpu"),
        ({"instruction_set": "abacus"}, "instruction_set: wanted abacus, here "),
        ({"threads": 256}, "threads: wanted 256, here "),
    ],
)
def test_a_worker_on_another_machine_refuses_with_the_setting_that_fits(changes, said, monkeypatch) -> None:
    monkeypatch.setattr("components.models.runtime.has_cuda", lambda: False)
    here = Runtime().resolve()
    dispatch._check_machine(here)
    with pytest.raises(MachineMismatch) as refused:
        dispatch._check_machine(here.model_copy(update=changes))
    assert said in str(refused.value)
    assert f"threads: {here.threads}, instruction_set: {here.instruction_set}}}" in str(refused.value)
