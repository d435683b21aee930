"""Computed again apart from all that is stored: equal bytes, or others and what could explain them; moved inputs."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.gates.judging import GatesConfig
from components.models.runtime import Runtime
from components.store.store import ArtifactStore, Record
from flows.cli.__main__ import app
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.models import reproduce as module
from flows.models.reproduce import Comparison, Reproduction, differences, reproduce
from flows.models.reproduce_text import text
from tasks import stages
from tasks.execution import computing
from tasks.execution.context import Execution, Reporting, RunContext
from tasks.execution.runner import run_stage
from tasks.result import Input
from tasks.stages import STAGES, Stage

TOY = '''
"""Two stages: the first reads a file, the second the first's artifact. `noise` is read too, and no part of any key."""
import json
from pathlib import Path

from components.base.settings import Settings


class Job(Settings):
    value: int = 1


def run(job, inputs, out, observe):
    noise = Path(__file__).with_name("noise").read_text()
    if noise == "stop" and "sft" in inputs:
        raise KeyboardInterrupt
    with Path(__file__).with_name("calls").open("a") as file:
        file.write(" ".join(sorted(inputs)) + chr(10))
    read = {name: (path / "value" if path.is_dir() else path).read_text() for name, path in inputs.items()}
    (out / "artifact").mkdir()
    (out / "artifact" / "value").write_text(json.dumps([job.value, read]) + (noise if "sft" not in inputs else ""))
    (out / "artifact" / "sheet").write_text("filled" + (noise if "sft" not in inputs else ""))
    return {"toy/loss": float(job.value + len(noise)), "toy/odd": float("nan")}
'''
RUN = "r1"


class Toy:
    """A home with one run of two toy stages, and their source."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.data = folder, folder / "home", folder / "pairs.jsonl"
        self.source = folder / "source"
        self.source.mkdir()
        (self.source / "toy_reproduced.py").write_text(TOY)
        self.noise = self.source / "noise"
        self.noise.write_text("")
        self.data.write_text("pairs")
        self.stages = {name: Stage(name, "toy_reproduced", "toy_reproduced:Job", ("pydantic",))
                       for name in ("sft", "ppo")}  # fmt: skip
        self.said = io.StringIO()

    def start(self, run: str) -> RunContext:
        records = {"execution": Execution(root=self.source), "reporting": Reporting(track=False, console=self.console)}
        return RunContext.start(self.home, "tiny", GatesConfig(), stages=tuple(self.stages), run=run, **records)

    def compute(self, sheet_from_sft: bool = False) -> None:
        """The run."""
        with self.start(RUN) as ctx:
            job = self.stages["sft"].load_job()(value=7)
            sft = run_stage(self.stages["sft"], job, {"preferences": Input.of(self.data)}, ctx)
            given: dict[str, Any] = {"sft": sft}
            if sheet_from_sft:
                given["sheet"] = Input.of(sft.path / "sheet")
            run_stage(self.stages["ppo"], self.stages["ppo"].load_job()(), given, ctx)

    @property
    def console(self) -> Console:
        return Console(file=self.said, width=200)

    @property
    def calls(self) -> list[str]:
        """What was computed: the inputs' names of each."""
        return (self.source / "calls").read_text().splitlines()

    def again(self, asked: str = RUN, **options: Any) -> Reproduction:
        return reproduce(self.home, asked, console=self.console, root=self.source, **options)

    def stored(self) -> dict[str, bytes]:
        """All that the home holds but for what reproducing keeps."""
        files = (path for part in ("store", "runs", "work") for path in (self.home / part).rglob("*"))
        return {str(path): path.read_bytes() for path in files if path.is_file() and not path.is_symlink()}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Toy(tmp_path)
    monkeypatch.syspath_prepend(str(made.source))
    for place in (module, stages):
        monkeypatch.setattr(place, "KNOWN", made.stages)
    sys.modules.pop("toy_reproduced", None)
    yield made
    sys.modules.pop("toy_reproduced", None)


def test_equal_bytes_are_said_though_everything_is_stored_and_nothing_stored_is_touched(toy: Toy) -> None:
    toy.compute()
    before = toy.stored()
    found = toy.again()
    assert toy.calls == ["preferences", "sft"] * 2, "hits of the store must not count"
    assert found.same and [pair.recorded.stage for pair in found.pairs] == ["sft", "ppo"]
    assert [pair.recorded.key for pair in found.pairs] == [pair.made.key for pair in found.pairs]
    assert toy.stored() == before and list((toy.home / "reproduce").iterdir()) == []
    lines = list(text(found))
    assert lines[0].endswith("the same") and lines[-1] == f"Reproduced: run {RUN}, 2 artifacts, byte for byte the same."
    assert toy.again(f"{RUN}/sft").same and toy.calls[4:] == ["preferences"], "a model's ancestry alone"


def test_a_store_that_is_shared_is_neither_asked_nor_written(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_STORE", str(tmp_path / "shared"))
    toy.compute()
    records = sorted((tmp_path / "shared" / "records").rglob("*.json"))
    assert toy.again().same and toy.calls == ["preferences", "sft"] * 2
    assert sorted((tmp_path / "shared" / "records").rglob("*.json")) == records != []


def test_other_bytes_give_the_metrics_side_by_side_and_stay_apart(toy: Toy) -> None:
    toy.compute()
    toy.noise.write_text("...")
    before = toy.stored()
    found = toy.again()
    assert not found.same and not found.explained
    assert [pair.same for pair in found.pairs] == [False, False], "the second is computed from what the first is now"
    assert found.pairs[1].made.inputs == {"sft": found.pairs[0].made.digest}
    shown = "\n".join(text(found))
    assert [line.split() for line in shown.splitlines() if line.startswith("toy/")] == [
        ["toy/loss", "7", "10", "3"], ["toy/loss", "1", "4", "3"],
    ]  # fmt: skip
    assert "sft: no recorded difference explains it" in shown and str(found.folder) in shown
    assert toy.stored() == before
    assert found.folder is not None and ArtifactStore(found.folder, alone=True).lookup(found.pairs[0].made.key)
    toy.noise.write_text("")
    assert toy.again().same, "what differed is not taken up by the next attempt"


@pytest.mark.parametrize("what", ["cpu", "code", "library"])
def test_what_differs_between_the_machines_or_programs_is_named_beside_other_bytes(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    toy.compute()
    toy.noise.write_text("...")
    options = {}
    if what == "cpu":
        monkeypatch.setattr(computing, "_cpu_model", lambda: "Another CPU")
    elif what == "code":
        source = toy.source / "toy_reproduced.py"
        source.write_text(source.read_text() + "\nMORE = 1\n")
        options = {"allow_other_code": True}
    else:
        monkeypatch.setattr("components.keys.fingerprint._version", lambda _: "99")
    found = toy.again(**options)
    assert not found.same and found.explained
    expected = {"cpu": "-> Another CPU", "code": "toy_reproduced.py changed", "library": "library pydantic "}[what]
    assert any(expected in each for each in differences(found.pairs[0]))
    assert expected in "\n".join(text(found))


@pytest.mark.parametrize(
    ("engine", "invariant", "said"), [("vllm", False, True), ("vllm", True, False), ("local", None, False)]
)
def test_a_server_that_is_not_batch_invariant_explains_other_bytes(
    toy: Toy, engine: str, invariant: bool | None, said: bool
) -> None:
    toy.compute()
    (pair, *_) = toy.again().pairs
    rollout = {"engine": engine, "batch_invariant": invariant}
    by_server = pair.recorded.model_copy(update={"job": {"ppo": {"rollout": rollout}}})
    found = differences(Comparison(by_server, pair.made))
    assert any("rollouts by vllm without batch invariance" in each for each in found) is said


def test_what_explains_a_later_stage_excuses_no_earlier_one(toy: Toy) -> None:
    """A later one's own inputs are others by then, so that its bytes prove nothing either way."""
    toy.compute()
    toy.noise.write_text("...")
    first, second = toy.again().pairs
    moved = second.made.model_copy(update={"environment": {**second.made.environment, "cpu": "Another CPU"}})
    assert not Reproduction("", [first, Comparison(second.recorded, moved)], None).explained
    also = first.made.model_copy(update={"environment": {**first.made.environment, "cpu": "Another CPU"}})
    assert Reproduction("", [Comparison(first.recorded, also), second], None).explained


def test_other_code_is_refused_with_what_to_check_out_unless_it_is_allowed(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {"version": "0", "commit": "c0ffee" + "0" * 34, "dirty": True}
    monkeypatch.setattr(computing, "code_version", lambda: recorded)
    toy.compute()
    source = toy.source / "toy_reproduced.py"
    source.write_text(source.read_text().replace("job.value +", "job.value + 0 +"))
    with pytest.raises(UserError, match=r"git checkout c0ffee0+ \(it had uncommitted changes.*--allow-other-code"):
        toy.again()
    assert toy.calls == ["preferences", "sft"]
    assert toy.again(allow_other_code=True).same
    assert "git checkout c0ffee" in toy.said.getvalue()
    source.write_text(source.read_text() + "# a comment is no other code\n")
    source.write_text(TOY + "# a comment is no other code\n")
    assert toy.again().same


def test_a_record_with_a_removed_option_names_its_commit() -> None:
    job = {"ppo": {"mask_truncated": True}}
    old = SimpleNamespace(stage="ppo", run="r1", job=job, environment={"code": {"commit": "c0ffee"}})
    with pytest.raises(UserError, match=r"^ppo: this version does not know .* Check out the commit c0ffee\.$"):
        module._job(old)  # type: ignore[arg-type]


def test_inputs_are_found_by_digest_where_they_were_or_where_the_user_says(toy: Toy, tmp_path: Path) -> None:
    toy.compute()
    moved = toy.data.rename(tmp_path / "moved.jsonl")
    with pytest.raises(UserError, match=r"preferences: .*pairs.jsonl does not exist. .*--data preferences=PATH"):
        toy.again()
    assert toy.again(data=[("preferences", moved)]).same
    moved.write_text("other pairs")
    with pytest.raises(UserError, match=r"moved.jsonl has the sha256 \w+ now\. .*--data preferences=PATH \(sha"):
        toy.again(data=[("preferences", moved)])
    with pytest.raises(UserError, match=r"preferences: .*gone.jsonl does not exist"):
        toy.again(data=[("preferences", tmp_path / "gone.jsonl")])
    with pytest.raises(UserError, match=r"--data prompts: there is no such input; there is preferences."):
        toy.again(data=[("prompts", moved)])
    (toy.home / "runs" / RUN / "done" / "sft.json").unlink()
    with pytest.raises(UserError, match="this home does not record where it was read"):
        toy.again()


def test_of_two_inputs_of_one_name_the_content_says_which_is_meant(toy: Toy, tmp_path: Path) -> None:
    """A run with a reference rests on the reference's own preferences too, which no `--data` could name."""
    toy.compute()
    (earlier := tmp_path / "earlier.jsonl").write_text("earlier pairs")
    with toy.start("r2") as ctx:
        job = toy.stages["sft"].load_job()()
        reference = run_stage(toy.stages["sft"], job, {"preferences": Input.of(earlier)}, ctx)
        given = {"preferences": Input.of(toy.data), "reference": Input(digest=reference.digest, path=reference.path)}
        run_stage(toy.stages["ppo"], job, given, ctx)
    moved, old = toy.data.rename(tmp_path / "moved.jsonl"), earlier.rename(tmp_path / "old.jsonl")
    with pytest.raises(UserError, match=r"does not exist\. Give the original with --data preferences=PATH \(sha256"):
        toy.again("r2")
    assert toy.again("r2", data=[("preferences", moved), ("preferences", old)]).same
    with pytest.raises(UserError, match=r"earlier\.jsonl does not exist"):
        toy.again("r2", data=[("preferences", moved)])
    old.rename(earlier)
    assert toy.again("r2", data=[("preferences", moved)]).same


def test_a_file_of_an_earlier_artifact_is_taken_as_it_is_now(toy: Toy) -> None:
    """The simulated judges' sheet is one: in a reproduction that differs, it is that one's."""
    toy.compute(sheet_from_sft=True)
    assert toy.again().same
    toy.noise.write_text("...")
    first, second = toy.again().pairs
    assert second.made.inputs["sheet"] == first.made.files["sheet"] != first.recorded.files["sheet"]
    assert toy.again().folder, "two within one second are kept both"


def test_data_that_equal_a_file_of_what_was_made_of_them_are_still_data(toy: Toy) -> None:
    toy.data.write_text("filled")  # as the first stage's `sheet` says
    toy.compute()
    assert toy.again().same


def test_an_interrupted_reproduction_goes_on_where_it_was(toy: Toy) -> None:
    toy.compute()
    (toy.source / "calls").unlink()
    toy.noise.write_text("stop")
    with pytest.raises(KeyboardInterrupt):
        toy.again()
    assert toy.calls == ["preferences"]
    toy.noise.write_text("")
    found = toy.again()
    assert toy.calls == ["preferences", "sft"] and not found.same, "its first half was made of other noise"


VARIANTS = {
    "plain": [
        "sft.base=/somewhere",
        "data.preferences=/a/file",
        "data.demonstrations=/another",
        "ppo.checkpoint_every=7",
    ],
    "lora": ["reward.lora.rank=3", "ppo.lora.targets=[q_proj]", "ppo.kl.form=k2"],
    "refresh": ["reward.refresh.from_run=an earlier run", "reward.refresh.replay=0.5", "reward.members=3"],
    "objectives": [
        "reward.objectives.helpful=1",
        "reward.objectives.compliant=2",
        "seed=5",
        "data.columns.prompt=asked",
    ],
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_a_records_options_are_enough_to_give_its_stage_the_same_job(settings: list[str]) -> None:
    config = load_config("tiny", [parse_override(each) for each in settings]).resolved()
    for stage in STAGES.values():
        values = keyed_values(config.stage_job(stage))
        kept = json.loads(json.dumps(values))
        record = Record(stage=stage.name, key="k", digest="d", files={}, job=kept, run="r")
        assert keyed_values(module._job(record)) == values


def test_a_runtime_that_this_machine_lacks_is_replaced_by_its_own_and_only_where_it_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("components.models.runtime.cpu_instruction_set", lambda: "avx2")
    recorded = Runtime(device="cpu", dtype="bfloat16", threads=1, instruction_set="amx_bf16").resolve()
    assert module._fitting(recorded) == recorded.model_copy(update={"instruction_set": "avx2"})


@pytest.mark.parametrize(("same", "explained", "code"), [(True, False, 0), (False, True, 0), (False, False, 3)])
def test_the_exit_code_is_three_only_where_nothing_explains_other_bytes(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, same: bool, explained: bool, code: int
) -> None:
    toy.compute()
    if not same:
        toy.noise.write_text("...")
    if explained:
        monkeypatch.setattr(computing, "_cpu_model", lambda: "Another CPU")
    monkeypatch.setenv("TETHER_HOME", str(toy.home))
    original: Callable[..., Reproduction] = reproduce
    monkeypatch.setattr(module, "reproduce", lambda *given: original(*given, console=toy.console, root=toy.source))
    done = CliRunner().invoke(app, ["reproduce", RUN])
    assert done.exit_code == code, done.output
    assert "sft" in done.output
    assert CliRunner().invoke(app, ["reproduce", RUN, "--data", "nothing"]).exit_code == 2
