"""What people call a run: taken as given, refused where it can't be shown, no part of any key."""

import json

import pytest

from components.base.errors import UserError
from tasks.execution.runner import run_stage
from tasks.runs.journal import current_user
from tasks.runs.run_label import LONGEST_NAME, LONGEST_TAG, LONGEST_VALUE, Label
from tasks.runs.status import load_status


def test_a_tag_is_a_key_with_a_value_or_alone() -> None:
    label = Label.of("  night one ", ["seed=1", "baseline", "note = a = b", "team/größe=12"])
    assert label == ("night one", {"seed": "1", "baseline": "", "note": "a = b", "team/größe": "12"})
    assert label.written == ["seed=1", "baseline", "note=a = b", "team/größe=12"]
    assert Label.of(None) == Label() == ("", {})


@pytest.mark.parametrize(
    ("name", "tags", "said"),
    [
        ("", [], "--name: the name is empty"),
        (" ", [], "--name: the name is empty"),
        ("a\nb", [], r"--name: 'a\\nb' holds a line break"),
        ("\x1b[31mred", [], "--name: .* can't be shown"),
        ("x" * (LONGEST_NAME + 1), [], f"--name: {LONGEST_NAME + 1} characters are too many; at most {LONGEST_NAME}"),
        (None, ["=1"], "--tag '=1': a tag is KEY=VALUE or KEY"),
        (None, [""], "--tag '': a tag is KEY=VALUE or KEY"),
        (None, ["a b=1"], "--tag 'a b=1'"),
        (None, ["-x=1"], "--tag '-x=1'"),
        (None, ["team//a=1"], "--tag 'team//a=1'"),
        (None, ["team/../a=1"], "--tag 'team/../a=1'"),
        (None, ["mlflow.runName=x"], "not with mlflow. or tether."),
        (None, ["lineage.digest=x"], "not with .* lineage."),
        (None, ["cache_hit=true"], "not with .* cache_hit"),
        (None, ["x" * (LONGEST_TAG + 1)], f"at most {LONGEST_TAG} letters"),
        (None, ["k=a\tb"], r"--tag k: 'a\\tb' holds"),
        (None, ["k=" + "v" * (LONGEST_VALUE + 1)], f"--tag k: {LONGEST_VALUE + 1} characters"),
        (None, ["seed=1", "seed=2"], "--tag 'seed=2': seed is given twice"),
    ],
)
def test_what_cannot_be_shown_on_a_line_is_refused(name: str | None, tags: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Label.of(name, tags)


def test_the_longest_are_taken() -> None:
    label = Label.of("x" * LONGEST_NAME, [f"{'k' * LONGEST_TAG}={'v' * LONGEST_VALUE}"])
    assert len(label.name) == LONGEST_NAME and label.written == ["k" * LONGEST_TAG + "=" + "v" * LONGEST_VALUE]


def test_run_json_keeps_name_tags_and_who_started_it_and_a_key_none_of_them(start, kit, home) -> None:
    with start(label=Label("night one", {"seed": "1"})) as named:
        first = run_stage(kit.toy("sft"), kit.ToyJob(), {}, named)
    with start() as plain:
        second = run_stage(kit.toy("sft"), kit.ToyJob(), {}, plain)
    document = json.loads((named.folder / "run.json").read_text())
    assert {name: document[name] for name in ("name", "tags", "user")} == {
        "name": "night one", "tags": {"seed": "1"}, "user": current_user(),
    }  # fmt: skip
    assert second.cached and first.record.key == second.record.key
    assert load_status(home, plain.run).name == "" and load_status(home, named.run).tags == {"seed": "1"}


def test_a_run_of_before_there_were_names_still_reads_and_goes_on(start, home) -> None:
    with start() as ctx:
        pass
    path = ctx.folder / "run.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({name: v for name, v in document.items() if name not in ("name", "tags", "user")}))
    status = load_status(home, ctx.run)
    assert (status.name, status.tags, status.user) == ("", {}, "")
    with type(ctx).resume(home, ctx.run, ctx.gates, reporting=ctx.reporting) as again:
        assert again.status.document.label == Label()
