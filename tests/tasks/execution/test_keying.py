"""Which stages are computed again when a module is edited: those whose bytes it can change, and no others."""

import ast
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from components.keys.fingerprint import LEFT_OUT, PACKAGES, ROOT, TASKS, code_parts
from components.models.runtime import Runtime
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tasks.execution.keying import built_in_task, key_of
from tasks.result import Input
from tasks.stages import OPTIONAL, STAGES

ALL = set(STAGES) - set(OPTIONAL)
SAMPLING = {"sft", "reward", "ppo", "human_eval.sample"}
JUDGED = {"human_eval.reward"}
DESK = SAMPLING | {"validate"}
INPUTS = {
    "validate": [], "sft": ["data"], "reward": ["data", "sft"], "ppo": ["data", "sft", "reward"],
    "human_eval.sample": ["data", "sft", "ppo"], "human_eval.reward": ["sample", "reward"],
    "human_eval": ["sample", "scores", "sheet"],
    "validate.judge": [], "reward.judge": ["data", "sft"],
}  # fmt: skip
CODE = "\n_EDITED = 1\n"

# file, what is put in the place of what (all of the file where "" is), stages with the built-in task, with own data
# Tell prompts apart by their words; ppo scores texts by reward models from outside, with the code of `tether eval`.
PROMPTS = {"validate", "reward", "ppo", "human_eval", "human_eval.sample"}
TABLE = [
    ("components/base/errors.py", "Make room", "Free some space", set(), set()),
    ("components/base/errors.py", "", CODE, set(), set()),
    ("components/base/process.py", "", CODE, set(), set()),
    ("components/training/stopping.py", "", CODE, set(), set()),
    ("components/gates/remedies.py", "", CODE, set(), set()),
    ("components/gates/self_checks.py", "", CODE, set(), set()),
    ("components/human_eval/sheet_checks.py", "", CODE, set(), set()),
    ("components/training/training_checks.py", "", CODE, set(), set()),
    ("components/reward/evaluation/model_checks.py", "", CODE, set(), set()),
    ("data_contracts/label_direction.py", "", CODE, set(), set()),
    ("components/store/store.py", "", CODE, set(), set()),
    ("tasks/execution/runner.py", "", CODE, set(), set()),
    ("flows/cli/__main__.py", "", CODE, set(), set()),
    ("components/data/readers.py", 'raise UserError(f"', 'raise UserError(f"More words: ', set(), set()),
    ("components/ppo/stage.py", 'raise CheckFailed(f"', 'raise CheckFailed(f"{update} and ', set(), set()),
    ("components/ppo/stage.py", "raise CheckFailed(", "raise UserError(", {"ppo"}, ...),
    ("components/data/rows.py", 'Problem("', 'Problem("more words: ', PROMPTS, ...),
    ("components/data/support_desk/grammar.py", "Best wishes.", "Kind regards.", DESK, set()),
    ("components/data/support_desk/desk.py", "KEPT = 0.25", "KEPT = 0.26", DESK, set()),
    ("components/data/support_desk/task.py", "", CODE, SAMPLING, SAMPLING),
    ("components/base/hashing.py", "", CODE, ALL - JUDGED, ALL - JUDGED),
    ("components/base/settings.py", "", CODE, ALL, ALL),
    ("components/stats/intervals.py", "", CODE, {"validate", "sft", "reward", "ppo", "human_eval"}, ...),
    ("components/data/rows.py", "", CODE, PROMPTS, ...),
    ("data_contracts/judge_pairs.py", "", CODE, set(), set()),
    ("components/reward/substages/judge.py", "", CODE, set(), set()),
    ("data_contracts/validate.py", "", CODE, {"validate"}, ...),
    ("components/models/sampling.py", "", CODE, SAMPLING, ...),
    ("components/training/loop.py", "", CODE, SAMPLING, ...),
    ("components/sft/config.py", "", CODE, {"sft"}, ...),
    ("components/reward/train.py", "", CODE, {"reward"}, ...),
    ("components/ppo/maths.py", "", CODE, {"ppo"}, ...),
    ("components/human_eval/blinded_sample.py", "", CODE, {"human_eval.sample"}, ...),
    ("components/reward/substages/sheet_scores.py", "", CODE, JUDGED, ...),
    ("components/stats/calibration/calibration_metrics.py", "", CODE, {"reward", "human_eval"}, ...),
    ("components/human_eval/unblinded_score.py", "", CODE, {"human_eval"}, ...),
]  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of our packages."""
    root = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture(scope="module", params=["built-in", "own"])
def keys(request, tree, tmp_path_factory):
    """What gives the keys of all stages over a source tree, with data of the built-in task or with people's."""
    own, folder = request.param == "own", tmp_path_factory.mktemp("inputs")
    (folder / "task.json").write_text('{"name": "none"}' if own else '{"name": "support-desk"}')
    config = load_config("tiny").model_copy(update={"runtime": Runtime(device="cpu", dtype="float32", threads=2)})
    given = {
        name: Input(path=folder, digest=name)
        for name in ("data", "sft", "reward", "ppo", "sample", "scores", "sheet", "preferences", "judge_preferences")
    }
    wanted = INPUTS | ({"validate": ["preferences"], "validate.judge": ["judge_preferences"]} if own else {})

    def find(root: Path) -> dict[str, str]:
        found = {}
        for name in wanted:
            stage = STAGES[name]
            inputs = {each: given[each] for each in wanted[name]}
            found[name] = key_of(stage, config.stage_job(stage), inputs, root)[0]
        return found

    return own, find, find(tree)


def shown(value: object) -> str:
    """Part of a test's name: the same in every process, which a set's own order is not."""
    return str(sorted(value) if isinstance(value, set) else value)[:40]


@pytest.mark.parametrize(("file", "old", "new", "built_in", "of_own"), TABLE, ids=shown)
def test_an_edit_changes_the_keys_of_the_stages_whose_bytes_it_can_change(tree, keys, file, old, new, built_in, of_own):
    own, find, before = keys
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new, 1) if old else text + new)
    try:
        after = find(tree)
    finally:
        (tree / file).write_text(text)
    expected = built_in if not own or of_own is ... else of_own
    changed = {name for name in before if before[name] != after[name]}
    assert {name for name in changed if name in ALL} == expected
    assert ("validate.judge" in changed) == ("validate" in expected or file == "data_contracts/judge_pairs.py")
    assert ("reward.judge" in changed) == ("reward" in expected or file == "components/reward/substages/judge.py")


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    """Every module that stands in a stage's key, and its tree."""
    names = {name for stage in STAGES.values() for name in code_parts(stage.module)["source"]}
    files = {name: ROOT / f"{name.replace('.', '/')}.py" for name in names}
    return {name: ast.parse(file.read_text()) for name, file in files.items() if file.is_file()}


def imported(tree: ast.Module) -> set[str]:
    """What a module imports, by name."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    return {*plain, *(str(node.module) for node in froms), *(f"{n.module}.{a.name}" for n in froms for a in n.names)}


def test_what_no_key_holds_is_used_only_where_it_cannot_reach_an_artifact(modules) -> None:
    """Whoever imports process ids or signals anew says here why they don't end up in an artifact."""
    users = {
        # Names of temporary files and folders: what is written in them is moved, or read and removed.
        "components.base.process": {"components.base.files", "components.rollouts.transfer"},
        "components.training.stopping": {"components.training.checkpoint"}, "components.base.redaction": set(),
        # It reads what was written, and raises or returns nothing.
        "components.human_eval.sheet_checks": {
            "components.human_eval.blinded_sample", "components.human_eval.unblinded_score",
        },
        "components.training.training_checks": {
            "components.ppo.monitors.by_the_book", "components.reward.train", "components.sft.stage",
            "components.training.loop",
        },
        "components.reward.evaluation.model_checks": {"components.ppo.monitors.boundaries", "components.reward.stage"},
        "data_contracts.label_direction": {"data_contracts.published_splits"},
        # Records of gates, which judge after a stage, and of alarms, of which PPO stores no advice.
        "components.gates.remedies": {
            "components.ppo.alarm_table", "components.gates.gate", "components.gates.built_in.human_eval_gates",
            "components.gates.built_in.evaluation_gates",
            "components.gates.built_in.policy_gates", "components.gates.built_in.ppo_gates",
            "components.gates.built_in.reward_gates", "components.gates.built_in.sft_gates",
            "components.gates.built_in.validate_gates",
        },
    }  # fmt: skip
    # What the self-checks import is theirs alone: they hand nothing on.
    checks = {name for name in LEFT_OUT if name.endswith(("_checks", ".label_direction"))}
    imports = {name: imported(tree) for name, tree in modules.items()}
    assert {left: {name for name, found in imports.items() if left in found} for left in users} == users
    for left in LEFT_OUT.keys() - checks:
        tree = ast.parse((ROOT / f"{left.replace('.', '/')}.py").read_text())
        ours = {name for name in imported(tree) if name.split(".")[0] in PACKAGES}
        assert not {name for name in ours if not name.startswith(tuple(LEFT_OUT))}, left


def test_no_stage_goes_on_after_an_error_of_ours_whose_text_no_key_holds(modules) -> None:
    """Where an error is caught, its text could come into an artifact: then it ends in another error."""
    allowed = {
        "data_contracts.findings.texts",  # around a chat template, which raises none of ours
        "components.models.chat.templates",  # the same
        "components.models.chat.trial",  # a process of its own, whose reason ends in a UserError
        "components.human_eval.returned_labels",  # collects them, to raise all at once
        "components.keys.function_worker",  # a process of its own, which imports nothing of ours
        "components.human_eval.batch.returned_sheets",  # asks whether a file is a sheet, before any stage
    }
    caught = {"Exception", "BaseException", "TetherError", "UserError", "CheckFailed", "GateFailed", "MachineMismatch"}
    going_on = set()
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
                kinds = {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)} if node.type else caught
                going_on |= {name} if kinds & caught else set()
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                going_on |= {name} if {ast.unparse(each) for each in node.args} & caught else set()
    assert going_on == allowed


def test_options_of_the_built_in_task_are_in_the_key_only_where_it_is_the_source() -> None:
    """On own data a change of `data.generator`, which nothing reads there, had all stages computed again."""
    own = {"preferences": Input(digest="a" * 64, path=Path("pairs.jsonl"))}

    def key(inputs: Mapping[str, Input], *options: str) -> str:
        config = load_config("tiny", [parse_override(each) for each in options])
        return key_of(STAGES["validate"], config.stage_job(STAGES["validate"]), inputs)[0]

    more, stricter = "data.generator.pairs=77", "data.checks.unique.severity=error"
    assert key(own) == key(own, more) != key(own, stricter)
    assert len({key({}), key({}, more), key({}, stricter)}) == 3


def test_the_data_are_the_built_in_tasks_where_validate_generates_them_or_says_so(tmp_path: Path) -> None:
    nothing, validate = Input(path=tmp_path, digest="a" * 64), STAGES["validate"]
    assert built_in_task(validate, {}) == built_in_task(validate, {"base": nothing}) == "support-desk"
    assert built_in_task(validate, {"prompts": nothing}) == "support-desk"  # the pairs are generated all the same
    assert built_in_task(validate, {"preferences": nothing, "prompts": nothing}) is None
    assert built_in_task(validate, {"preferences/a.jsonl": nothing, "preferences/b.jsonl": nothing}) is None
    assert built_in_task(STAGES["validate.judge"], {"base": nothing}) == "support-desk"
    assert built_in_task(STAGES["validate.judge"], {"judge_preferences/a.jsonl": nothing}) is None
    for name, expected in (("none", None), ("support-desk", "support-desk")):
        data = tmp_path / name
        data.mkdir()
        (data / "task.json").write_text(f'{{"name": "{name}"}}')
        assert built_in_task(STAGES["reward"], {"data": Input(path=data, digest="b" * 64), "sft": nothing}) == expected
        assert expected is None or expected in TASKS
    assert built_in_task(STAGES["human_eval"], {"sample": nothing, "sheet": nothing}) is None
