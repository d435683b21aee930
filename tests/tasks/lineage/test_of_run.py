"""A run's lineage as a graph: its stages, what each was made of, and what its gates said."""

from pathlib import Path

from components.gates.judging import Verdict
from components.store.records import Record
from tasks.lineage.of_run import graph_of, verdict_in_short
from tasks.result import Input
from tasks.runs.journal import Done


def verdict(name: str, passed: bool, **fields: object) -> Verdict:
    return Verdict(name=name, metric="m/x", value=1.0, op="<=", threshold=2.0, passed=passed, **fields)


def done(stage: str, digest: str, inputs: list[Input], verdicts: tuple[Verdict, ...] = ()) -> Done:
    record = Record(
        key="k" * 64, digest=digest * 64, stage=stage, run="r", started="2026-01-01T00:00:00+00:00", seconds=1.0,
        files={}, inputs={}, job={}, metrics={}, parts={}, environment={},
    )  # fmt: skip
    return Done(
        time=0, record=record, path=Path("/x"), run="r", user="ada", step=0,
        verdicts=list(verdicts), inputs=inputs, attachments={},
    )  # fmt: skip


def made(name: str, digest: str, stage: str = "", path: str = "/x") -> Input:
    return Input(name=name, digest=digest * 64, path=Path(path), stage=stage)


def test_parts_of_a_stage_are_one_box_and_external_inputs_have_their_own() -> None:
    pairs, sheet = made("preferences", "1", path="/d/pairs.jsonl"), made("sheet", "2", path="/d/sheet.csv")
    data, policy = made("data", "a", "validate"), made("ppo", "b", "ppo")
    graph = graph_of(
        [
            done("validate", "a", [pairs], verdicts=(verdict("validate.pairs", True),)),
            done("ppo", "b", [data]),
            done("human_eval.sample", "c", [data, policy]),
            done("human_eval", "d", [made("sample", "c", "human_eval"), sheet]),
        ],
        {"b" * 64: "version 2"},
    )
    found = {box.title: box for box in graph.boxes}
    assert list(found) == ["preferences", "data", "policy", "sheet", "human eval"]
    assert found["policy"].lines == ("version 2", "b" * 12)
    assert found["preferences"].external and found["preferences"].lines == ("pairs.jsonl", "1" * 12)
    assert found["human eval"].lines == ("d" * 12,)
    assert found["data"].verdict == "1 gate passed"
    assert set(graph.arrows) == {
        ("1" * 64, "validate"), ("validate", "ppo"), ("validate", "human_eval"), ("ppo", "human_eval"),
        ("2" * 64, "human_eval"),
    }  # fmt: skip


def test_many_files_of_a_kind_are_one_box() -> None:
    files = [made(f"preferences/{name}", name) for name in "1234"]
    titles = [(box.title, box.lines) for box in graph_of([done("validate", "a", files)]).boxes]
    assert titles == [("preferences", ("4 files",)), ("data", ("a" * 12,))]


def test_a_stage_that_waits_for_labels_is_not_shown_as_finished() -> None:
    (box,) = graph_of([done("human_eval.sample", "c", [])]).boxes
    assert (box.verdict, box.state) == ("not finished", "warned")


def test_the_worst_that_gates_say_is_what_a_box_shows() -> None:
    passed, failed = verdict("policy.kl", True), verdict("ppo.stopped", False)
    waived = verdict("ppo.ratio", False, waived=True, user="ada", reason="known")
    off = Verdict(name="ppo.off", metric="m/x", value=None, op="<=", threshold=None, passed=True)
    assert verdict_in_short([passed, failed, waived]) == ("failed: stopped", "failed")
    assert verdict_in_short([passed, waived, off]) == ("waived: ratio", "warned")
    assert verdict_in_short([verdict("policy.kl", False, warn_only=True)]) == ("warned: kl", "warned")
    assert verdict_in_short([passed, passed, off]) == ("2 gates passed", "passed")
    assert verdict_in_short([verdict("a.x", False), verdict("a.y", False)]) == ("failed: x and 1 more", "failed")
    assert verdict_in_short([off]) == ("", "none")
