"""What a run goes on from: the newest or a named run's config and records, never a mix of its own making."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.base.settings import Settings, keyed_values
from components.gates.table import GATES
from components.human_eval.sheet import SIMULATED
from components.models.runtime import Gpus
from flows.config.profiles import parse_override
from flows.config.run_config import check_config, load_config, to_values
from flows.launch.begin import Launch, new_run, rerun
from flows.launch.label_runs import compare, scoring
from flows.launch.reports import what_is_simulated
from flows.launch.request import Request
from flows.launch.run_computing import compute, first_to_compute
from flows.models.model_facts import model_facts
from flows.reports.run_facts import run_facts
from flows.rlhf import pipeline
from flows.sources import Sources, find_sources
from tasks.execution.runner import _key, _parts, peek
from tasks.result import Given, StageResult
from tasks.runs.config import run_values
from tasks.runs.status import list_runs, load_status
from tasks.stages import PIPELINE, Stage
from tests.splits import pairs, write


def begin(home: Path, *changes: str) -> Launch:
    return new_run(home, "tiny", load_config("tiny", [parse_override(text) for text in changes]).resolved())


def end(launch: Launch, **states: str) -> str:
    with launch.ctx as ctx:
        for name, state in states.items():
            ctx.status.update(name, state=state)
    return launch.ctx.run


def finish(launch: Launch, upto: str = "human_eval") -> str:
    """End a run whose stages, up to one of them, have made a file each."""
    ctx = launch.ctx

    def publish(stage: Stage, job: Settings, inputs: Given) -> StageResult:
        if PIPELINE.index(stage.group) > PIPELINE.index(upto):
            raise KeyboardInterrupt
        key, parts, _ = _key(stage, job, inputs, ctx)
        out = ctx.home / "out"
        out.mkdir(parents=True)
        (out / SIMULATED).write_text(f"{stage.name} {job.seed} {len(ctx.store.attempts(key))}")
        about = {"stage": stage.name, "job": keyed_values(job), "parts": parts, "run": ctx.run}
        ctx.store.publish(key, out, None, {**about, "inputs": parts["inputs"]})
        out.rmdir()
        found = peek(stage, job, inputs, ctx)
        assert found is not None
        parts = _parts(stage, ctx, found.record.key, found.digest)
        ctx.status.update(stage.group, state="passed", key=found.record.key, digest=found.digest, parts=parts)
        return found

    with ctx, suppress(KeyboardInterrupt):
        pipeline(launch.config, launch.sources, publish)
    return ctx.run


def stored_stages(launch: Launch) -> list[str]:
    """The stages, from the first, that a run would find in the store."""
    found = []

    def look(stage: Stage, job: Settings, inputs: Given) -> StageResult:
        result = peek(stage, job, inputs, launch.ctx)
        if result is None:
            raise KeyboardInterrupt
        found.append(stage.name)
        return result

    with suppress(KeyboardInterrupt):
        pipeline(launch.config, launch.sources, look)
    return found


def test_a_run_says_that_no_gate_judges_kl_and_that_a_size_is_cut(tmp_path: Path) -> None:
    (note,) = begin(tmp_path, "ppo.kl.band=null").notes
    assert note.startswith("no gate judges KL, because ppo.kl.band is null") and "Set ppo.kl.band" in note
    (note,) = begin(tmp_path, "ppo.monitors.responses=100").notes
    assert note.startswith("ppo.monitors.responses is 100, but reward.scale_responses is 32, so only 32 are used.")
    assert not begin(tmp_path).notes


GPU = "runners.ppo={pool: gpu, runtime: {device: cuda, dtype: bfloat16, gpu: 'NVIDIA H100 (9.0)', cuda: '13.0'}}"
SERVED = ("ppo.rollout.engine=vllm", "ppo.rollout.version=0.32.0", "ppo.rollout.dtype=bfloat16")


def test_a_run_says_what_samples_and_what_a_server_changes(tmp_path: Path) -> None:
    (note,) = begin(tmp_path, GPU).notes
    assert note.startswith("PPO samples in the process that trains") and "TETHER_VLLM_URL" in note
    (note,) = begin(tmp_path, *SERVED, "ppo.rollout.batch_invariant=false").notes
    assert note.startswith("vLLM 0.32.0 (bfloat16) samples") and "again gives other bytes. Importance weights" in note
    (note,) = begin(tmp_path, *SERVED, "ppo.rollout.batch_invariant=true", GPU).notes
    assert "again gives the same bytes. Importance weights" in note
    assert not new_run(tmp_path, "tiny", load_config("tiny", settings(GPU)), Request(until="reward")).notes


def test_a_deployments_rerun_after_ppo_keeps_the_engine_that_the_run_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = load_config("tiny", settings("ppo.rollout.engine=auto"))
    run = finish(new_run(tmp_path, "tiny", auto))
    assert run_values(tmp_path, run)["ppo"]["rollout"]["engine"] == "local"
    for address in (None, "http://127.0.0.1:9"):  # another environment names a server, which nobody asks
        monkeypatch.setenv("TETHER_VLLM_URL", address) if address else None
        again = rerun(tmp_path, "human_eval", config=auto)
        assert again.ctx.status.document.origin["from"] == run and again.config.ppo.rollout.engine == "local"
        assert stored_stages(again)[-1] == "ppo"
    left_open = rerun(tmp_path, "human_eval", overrides=settings("ppo.rollout.engine=auto"))
    assert left_open.config.ppo.rollout.engine == "local", "and so does one that leaves it open by --set"
    with pytest.raises(UserError, match=r"ppo\.rollout"):
        rerun(tmp_path, "human_eval", config=load_config("tiny", settings("ppo.rollout.engine=vllm")))


def settings(*texts: str) -> list:
    return [parse_override(text) for text in texts]


def test_a_run_keeps_its_resolved_config(tmp_path: Path) -> None:
    launch = begin(tmp_path, "seed=3")
    end(launch)
    values = run_values(tmp_path, launch.ctx.run)
    assert values == to_values(launch.config)
    assert values["seed"] == 3
    assert "auto" not in values["runtime"].values()
    assert "judges, gold scores" in what_is_simulated(tmp_path, launch.ctx.run)
    people = end(begin(tmp_path, "human_eval.judges=people"))
    assert "People judge" in what_is_simulated(tmp_path, people)


def test_a_gate_that_no_profile_names_is_off_and_the_run_says_so(tmp_path: Path) -> None:
    assert list(begin(tmp_path, *(f"gates.{name}=null" for name in GATES)).notes) == []
    values = to_values(load_config("tiny", settings(*(f"gates.{name}=null" for name in GATES))))
    del values["gates"]["sft"]["loss"]
    config = check_config(values, "older.yaml").resolved()
    launch = new_run(tmp_path, "older", config)
    assert launch.notes == ["1 gate is off because the profile does not name it: sft.loss"]
    finish(launch)
    again = rerun(tmp_path, "human_eval", run=launch.ctx.run)
    assert again.notes[-1] == launch.notes[0]
    loose = (*(f"gates.{name}=null" for name in GATES if name != "ppo.stopped"), "ppo.kl.band=null")
    (said,) = begin(tmp_path, *loose, "ppo.kl.ceiling=null").notes
    assert said.startswith("the gate ppo.stopped is off because nothing can fail it") and "ppo.kl.ceiling" in said
    assert list(begin(tmp_path, *loose).notes) == []
    direct = (*loose, "policy.method=dpo", "policy.evaluate_every=null")
    said = begin(tmp_path, *direct).notes[-1]
    assert said.startswith("the gate ppo.stopped is off because nothing can fail it: policy.evaluate_every is null")
    assert "ppo.stopped" not in " ".join(begin(tmp_path, *direct, "policy.evaluate_every=2").notes)
    alarm = ("policy.stop_on_alarm=true", "gates.policy.chosen_log_ratio=-5")
    assert "ppo.stopped" not in " ".join(begin(tmp_path, *direct, *alarm).notes)
    said = begin(tmp_path, *direct, "policy.evaluate_every=2", "ppo.kl.ceiling=null").notes[-1]
    assert said.startswith("the gate ppo.stopped is off because nothing can fail it: ppo.kl.ceiling and ppo.kl.band")
    del values["gates"]
    (said,) = new_run(tmp_path, "older", check_config(values, "older.yaml").resolved()).notes
    assert said.startswith(f"{len(GATES) - 2} gates are off because the profile does not name them: validate")
    assert said.endswith(f" and {len(GATES) - 10} more")


def test_a_run_until_a_stage_looks_no_further_and_says_where_it_ends(tmp_path: Path) -> None:
    def begun(until: str | None, *refresh: str) -> Launch:
        return new_run(tmp_path, "tiny", config, request=Request(refresh=refresh, until=until))

    config = load_config("tiny", settings(*(f"gates.{name}=null" for name in GATES))).resolved()

    launch = begun("reward")
    assert first_to_compute(launch.config, launch.sources, launch.ctx) is not None
    half = finish(launch, upto="reward")
    again = begun("reward")
    assert first_to_compute(again.config, again.sources, again.ctx) is None
    whole = begun("human_eval")
    assert first_to_compute(whole.config, whole.sources, whole.ctx) is not None and not whole.ctx.status.document.until
    status = load_status(tmp_path, again.ctx.run)
    assert (status.until, status.as_json()["until"]) == ("reward", "reward")
    assert "until" not in load_status(tmp_path, whole.ctx.run).as_json()
    assert load_status(tmp_path, half).stage("ppo").state == "not_run"
    with pytest.raises(UserError, match="--until rewards: no such stage; there are validate, sft"):
        begun("rewards")
    with pytest.raises(UserError, match="--until sft: the run would end before ppo, which it is asked to compute"):
        begun("sft", "ppo")


def test_a_rerun_until_a_stage_ends_there_and_not_before_what_it_computes(tmp_path: Path) -> None:
    finish(begin(tmp_path))
    again = rerun(tmp_path, "sft", request=Request(until="reward"))
    assert (again.ctx.status.document.until, load_status(tmp_path, again.ctx.run).until) == ("reward", "reward")
    assert finish(again, upto="reward") and load_status(tmp_path, again.ctx.run).state == "passed"
    with pytest.raises(UserError, match="--until sft: the run would end before ppo"):
        rerun(tmp_path, "ppo", request=Request(until="sft"))


def test_a_rerun_has_the_newest_runs_config_with_changes_on_top(tmp_path: Path) -> None:
    finish(begin(tmp_path, "seed=1"))
    newest = finish(begin(tmp_path, "seed=2", "sft.epochs=1"))
    again = rerun(tmp_path, "reward", overrides=settings("reward.epochs=2"))
    assert (again.config.seed, again.config.sft.epochs, again.config.reward.epochs) == (2, 1, 2)
    assert again.ctx.reuse.refresh == frozenset({"reward", "reward.judge"})
    assert again.ctx.run != newest
    assert again.ctx.status.document.profile == "tiny"


def test_a_rerun_takes_the_newest_run_whose_inputs_stand_and_says_which(tmp_path: Path) -> None:
    whole = finish(begin(tmp_path, "seed=1"))
    half = finish(begin(tmp_path, "seed=2"), upto="sft")
    again = rerun(tmp_path, "ppo")
    assert again.ctx.run != whole and again.config.seed == 1
    assert again.notes[0] == f"ppo again from run {whole} (not {half}: reward: it has no artifact (not_run))"
    assert load_status(tmp_path, again.ctx.run).explanations()["origin"] == {"stage": "ppo", "from": whole}
    assert rerun(tmp_path, "reward", half).config.seed == 2
    with pytest.raises(UserError, match=f"this run does not have the results .*{half}: reward: it has no artifact"):
        rerun(tmp_path, "ppo", half)


def test_a_deployed_config_agrees_with_a_run_that_has_its_reward_function_until_the_function_is_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, home = tmp_path / "mine.py", tmp_path / "home"
    function.write_text("def score(prompts, responses, rows):\n    return [0.0 for _ in responses]\n")
    rewards = "ppo.rewards=[{source: 'function:mine:score'}]"
    first, asked = finish(begin(home, rewards)), load_config("tiny", settings(rewards))
    assert rerun(home, "human_eval", config=asked).notes[0] == f"human_eval again from run {first}"
    function.write_text(function.read_text().replace("0.0", "1.0"))
    with pytest.raises(UserError, match=r"a different ppo\.rewards"):
        rerun(home, "human_eval", config=asked)


def test_a_run_whose_config_is_of_another_version_is_passed_over(tmp_path: Path) -> None:
    whole, newer = finish(begin(tmp_path)), finish(begin(tmp_path))
    path = tmp_path / "runs" / newer / "config.yaml"
    path.write_text(path.read_text() + "old_key: 1\n")
    again = rerun(tmp_path, "ppo")
    assert again.notes[0].startswith(f"ppo again from run {whole} (not {newer}: its config: old_key = 1: no such key")


def test_a_worker_is_asked_for_only_where_it_is_to_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_server(needed_for: Mapping[str, str]) -> None:
        asked.append(dict(needed_for))
        raise UserError("no server")

    monkeypatch.setattr("tasks.prefect_flow.server.check_server", no_server)
    monkeypatch.setattr("flows.launch.run_computing.first_to_compute", lambda *_: "validate")
    finish(begin(tmp_path, "runners.ppo=gpu"))
    for stage in ("ppo", "human_eval"):
        with pytest.raises(UserError, match="no server"):
            compute(rerun(tmp_path, stage))
    config = load_config("tiny", settings("runners.sft=a", "runners.ppo=b")).resolved()
    for until in ("reward", "ppo"):
        with pytest.raises(UserError, match="no server"):
            compute(new_run(tmp_path, "tiny", config, request=Request(until=until)))
    assert asked == [{"ppo": "gpu"}, {}, {"sft": "a"}, {"sft": "a", "ppo": "b"}]


def test_a_run_whose_artifact_is_damaged_is_passed_over(tmp_path: Path) -> None:
    whole, newer = finish(begin(tmp_path, "seed=1")), begin(tmp_path, "seed=2")
    finish(newer)
    [sft] = newer.ctx.store.published_by("sft")[:1]
    damaged = newer.ctx.store.objects / sft.files[SIMULATED]
    damaged.chmod(0o644)
    damaged.write_text("other")
    again = rerun(tmp_path, "ppo")
    assert again.config.seed == 1
    assert f"not {newer.ctx.run}: sft: attempt 1: object damaged" in again.notes[0] and whole in again.notes[0]
    assert rerun(tmp_path, "sft").config.seed == 2, "what comes before sft stands"


def test_a_rerun_takes_the_runs_own_artifact_not_what_its_key_gave_since(tmp_path: Path) -> None:
    first = finish(begin(tmp_path))
    own = load_status(tmp_path, first).stages[0].digest
    finish(begin(tmp_path))  # writes other bytes under the same key
    assert load_status(tmp_path).stages[0].digest != own
    again = rerun(tmp_path, "reward", first)
    assert again.ctx.reuse.pinned["validate"].digest == own
    assert stored_stages(again)[:2] == ["validate", "sft"]


def test_a_rerun_leaves_the_earlier_run_as_it_is(tmp_path: Path) -> None:
    run = finish(begin(tmp_path))
    before = {path: path.read_bytes() for path in (tmp_path / "runs" / run).rglob("*") if path.is_file()}
    finish(rerun(tmp_path, "ppo", overrides=settings("ppo.kl.coefficient=0.3")))
    assert {path: path.read_bytes() for path in (tmp_path / "runs" / run).rglob("*") if path.is_file()} == before


def test_what_comes_before_the_stage_can_not_be_changed_or_refreshed(tmp_path: Path) -> None:
    run = finish(begin(tmp_path))
    for change, first in (
        ("sft.epochs=9", "sft"),
        ("generation.temperature=0.9", "validate"),
        ("data.preferences=other.jsonl", "validate"),
    ):
        with pytest.raises(
            UserError, match=rf"--set {change.split('=')[0]}: {first} .*tether rerun {first} --from {run}"
        ):
            rerun(tmp_path, "ppo", overrides=settings(change))
    with pytest.raises(UserError, match="--refresh sft: it comes before ppo"):
        rerun(tmp_path, "ppo", request=Request(refresh=["sft"]))
    with pytest.raises(UserError, match="--refresh dpo: no such stage"):
        rerun(tmp_path, "ppo", request=Request(refresh=["dpo"]))
    with pytest.raises(UserError, match="--refresh dpo: no such stage"):
        new_run(tmp_path, "tiny", load_config("tiny").resolved(), request=Request(refresh=["dpo"]))
    assert load_status(tmp_path).run == run


def test_another_seed_from_the_stage_on_keeps_the_inputs_and_says_so(tmp_path: Path) -> None:
    finish(begin(tmp_path))
    again = rerun(tmp_path, "ppo", overrides=settings("seed=7"))
    assert stored_stages(again) == ["validate", "sft", "reward"]
    assert again.config.seed == 7
    assert "seed 7 applies to ppo and later stages" in again.notes[1]


def test_a_run_of_another_machine_is_taken_as_it_is_and_resolved_here_from_the_stage_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("components.models.runtime.cpu_instruction_set", lambda: "abacus")
        run = finish(begin(tmp_path))
    again = rerun(tmp_path, "ppo")
    assert stored_stages(again) == ["validate", "sft", "reward"]
    assert again.config.runtime == again.config.runtime.resolve() and again.config.runtime.misfits() == []
    assert f"run {run} was resolved for another machine (instruction_set: wanted abacus" in again.notes[1]
    assert "the results of validate, sft, reward are reused" in again.notes[1]
    one = rerun(tmp_path, "ppo", overrides=settings("runtime.threads=1"))
    assert one.config.runtime.threads == 1


def test_a_runtime_that_this_machine_has_is_kept(tmp_path: Path) -> None:
    finish(begin(tmp_path, "runtime.threads=1", "runtime.dtype=bfloat16"))
    again = rerun(tmp_path, "ppo")
    assert (again.config.runtime.threads, again.config.runtime.dtype, len(again.notes)) == (1, "bfloat16", 1)


@pytest.fixture
def preferences(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "where is it", "chosen": "here", "rejected": "there"}) + "\n")
    return path


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    folder = tmp_path / "pretrained"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_data_file_that_is_gone_is_needed_only_where_it_is_read_again(
    tmp_path: Path, preferences: Path, pretrained: Path
) -> None:
    home = tmp_path / "home"
    run = finish(begin(home, f"data.preferences={preferences}", f"sft.base={pretrained}"), upto="ppo")
    digest = find_sources(load_config("tiny", settings(f"data.preferences={preferences}")), home).data["preferences"]
    preferences.unlink()
    sft = rerun(home, "sft")
    assert sft.sources.data["preferences"].digest == digest.digest
    assert stored_stages(sft) == ["validate"]
    with pytest.raises(UserError, match=r"pairs\.jsonl"):
        rerun(home, "validate", run)
    shutil.rmtree(pretrained)
    assert stored_stages(rerun(home, "ppo", run)) == ["validate", "sft", "reward"]
    with pytest.raises(UserError, match=r"sft\.base"):
        rerun(home, "sft", run)


def test_another_pretrained_model_than_the_one_validated_with_is_refused(tmp_path: Path, pretrained: Path) -> None:
    home = tmp_path / "home"
    finish(begin(home, f"sft.base={pretrained}"))
    moved = pretrained.rename(tmp_path / "moved")
    assert stored_stages(rerun(home, "sft", overrides=settings(f"sft.base={moved}"))) == ["validate"]
    (moved / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(UserError, match="not the model that validate was computed with"):
        rerun(home, "sft", overrides=settings(f"sft.base={moved}"))


def test_a_runs_own_options_are_those_that_no_profile_of_its_chain_sets(tmp_path: Path) -> None:
    """`mine.yaml` extends `team.yaml` extends tiny: their values are the profile's, also in a rerun and once the files
    are gone."""
    team, mine, home = tmp_path / "team.yaml", tmp_path / "mine.yaml", tmp_path / "home"
    team.write_text("extends: tiny\nppo: {clip_range: 0.1}\n")
    mine.write_text("extends: team.yaml\nsft: {epochs: 7}\n")
    config = load_config(mine, settings("ppo.kl.coefficient=0.3")).resolved()
    first = finish(new_run(home, str(mine), config))
    again = rerun(home, "ppo", first, overrides=settings("ppo.epochs=3"))
    mine.unlink()
    for run, own in ((first, {"ppo.kl.coefficient"}), (end(again), {"ppo.kl.coefficient", "ppo.epochs"})):
        facts = run_facts(home, run)
        assert facts.against == "the profile mine"
        assert {option.name for option in facts.options if option.changed} == own
    policy = model_facts(home, f"{first}/ppo")
    assert {name: option.default for name, option in policy.options.items()} == {"ppo.kl.coefficient": 0.1}


def test_a_form_takes_the_newest_run_that_agrees_with_it_on_what_comes_before(tmp_path: Path) -> None:
    fits = finish(begin(tmp_path))
    other = finish(begin(tmp_path, "sft.epochs=9"))
    form = load_config("tiny", settings("ppo.kl.coefficient=0.3"))
    again = rerun(tmp_path, "ppo", config=form, profile="mine")
    assert again.notes[0] == f"ppo again from run {fits} (not {other}: it has a different sft.epochs)"
    assert (again.config.ppo.kl.coefficient, again.ctx.status.document.profile) == (0.3, "mine")
    with pytest.raises(UserError, match=rf"{other}: it has a different sft\.epochs"):
        rerun(tmp_path, "ppo", other, config=form)


def test_a_learning_rate_that_is_null_is_chosen_once_kept_and_agreed_with(tmp_path: Path) -> None:
    null = ["sft.learning_rate=null", "ppo.learning_rate=null"]
    launch = begin(tmp_path, *null)
    (said,) = launch.notes
    assert said.startswith("chosen for a model of ") and "sft.learning_rate 0.001, ppo.learning_rate 0.0003" in said
    first = finish(launch)
    values = run_values(tmp_path, first)
    assert values["sft"]["learning_rate"] == 1e-3 and values["ppo"]["learning_rate"] == 3e-4
    assert rerun(tmp_path, "reward").config.ppo.learning_rate == 3e-4
    again = rerun(tmp_path, "ppo", config=load_config("tiny", settings(*null)))
    assert again.notes[0].startswith(f"ppo again from run {first}") and said in again.notes
    assert stored_stages(begin(tmp_path, "sft.learning_rate=0.001")) == stored_stages(begin(tmp_path, *null))
    adapted = rerun(tmp_path, "ppo", overrides=settings("ppo.learning_rate=null", "ppo.updates=4"))
    assert adapted.config.ppo.learning_rate == 3e-4 and "ppo.learning_rate 0.0003" in adapted.notes[-1]


def test_an_older_runs_kl_in_a_unit_without_a_gate_is_read_and_refused_only_where_ppo_is_computed_again(
    tmp_path: Path,
) -> None:
    token = ["ppo.kl.unit=token", "gates.policy.kl_per_token=0.2"]
    launch = begin(tmp_path, *token)
    finish(launch)
    saved = launch.ctx.folder / "config.yaml"
    text = saved.read_text()
    assert "kl_per_token: 0.2" in text
    saved.write_text(text.replace("kl_per_token: 0.2", "kl_per_token: null"))
    with pytest.raises(UserError, match=r"gates\.policy\.kl_per_token: ppo\.kl\.unit is token.* --set gates\.policy"):
        rerun(tmp_path, "ppo")
    assert rerun(tmp_path, "ppo", overrides=settings(token[1])).ctx.run
    with pytest.raises(UserError, match="no gate would judge KL"):
        new_run(tmp_path, "mine", check_config({"ppo": {"kl": {"unit": "token"}}}, "mine").resolved())


def test_an_older_runs_critic_options_without_a_critic_are_read_and_only_new_ones_refused(tmp_path: Path) -> None:
    launch = begin(tmp_path, "ppo.advantage=rloo", "ppo.group_size=2", "ppo.critic.learning_rate=null")
    finish(launch)
    saved = launch.ctx.folder / "config.yaml"
    assert saved.read_text().count("kind: separate") == 1
    saved.write_text(saved.read_text().replace("kind: separate", "kind: shared"))  # an earlier version accepted it
    assert rerun(tmp_path, "ppo").ctx.run
    for change in ("ppo.critic.start=sft", "ppo.critic={start: sft}"):
        with pytest.raises(UserError, match=r"--set: ppo\.critic\.start \(sft\) has no effect"):
            rerun(tmp_path, "ppo", run=launch.ctx.run, overrides=settings(change))


def test_a_removed_option_of_a_finished_stage_does_not_stop_a_rerun(tmp_path: Path) -> None:
    launch = begin(tmp_path, "human_eval.judges=people")
    finish(launch)
    saved = launch.ctx.folder / "config.yaml"
    saved.write_text(saved.read_text().replace("  updates:", "  mask_truncated: true\n  updates:"))  # ppo's
    assert run_values(tmp_path, launch.ctx.run)["ppo"]["mask_truncated"]
    (tmp_path / "sheet.csv").write_text("item\n")
    assert scoring(tmp_path, launch.ctx.run, tmp_path / "sheet.csv").config.human_eval.judges == "people"
    gone = r"its config: ppo\.mask_truncated = true: this option is gone.* start with `tether run`"
    with pytest.raises(UserError, match=gone):
        rerun(tmp_path, "ppo", run=launch.ctx.run)
    again = rerun(tmp_path, "human_eval", run=launch.ctx.run)
    assert "mask_truncated" not in run_values(tmp_path, again.ctx.run)["ppo"]


def test_a_flow_run_that_is_tried_again_takes_up_its_run_and_its_choice(tmp_path: Path) -> None:
    first = finish(begin(tmp_path))
    form = load_config("tiny")
    begun = rerun(tmp_path, "ppo", config=form, request=Request(flow_run="f1"))
    begun.ctx.finish()
    newest = finish(begin(tmp_path))
    again = rerun(tmp_path, "ppo", config=form, request=Request(flow_run="f1"))
    assert again.ctx.run == begun.ctx.run
    assert first in again.notes[0] and newest not in again.notes[0]
    assert rerun(tmp_path, "ppo", config=form, request=Request(flow_run="f2")).ctx.run != begun.ctx.run
    whole = new_run(tmp_path, "tiny", form.resolved(), request=Request(flow_run="f3"))
    whole.ctx.finish()
    assert new_run(tmp_path, "tiny", form.resolved(), request=Request(flow_run="f3")).ctx.run == whole.ctx.run


def test_rerunning_human_eval_samples_again(tmp_path: Path) -> None:
    finish(begin(tmp_path))
    assert rerun(tmp_path, "human_eval").ctx.reuse.refresh == {"human_eval.sample", "human_eval.reward", "human_eval"}


def test_a_rerun_of_no_stage_is_refused_and_leaves_no_run(tmp_path: Path) -> None:
    run = finish(begin(tmp_path))
    with pytest.raises(UserError, match="there are validate, sft"):
        rerun(tmp_path, "dpo")
    with pytest.raises(UserError, match=r"did you mean ppo\.updates"):
        rerun(tmp_path, "ppo", overrides=settings("ppo.update=1"))
    assert load_status(tmp_path).run == run


def test_only_a_run_that_waits_for_people_is_scored(tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_text("item\n")
    end(begin(tmp_path), human_eval="passed")
    with pytest.raises(UserError, match="does not wait for labels"):
        scoring(tmp_path, None, tmp_path / "sheet.csv")
    end(begin(tmp_path, "human_eval.judges=people"))
    with pytest.raises(UserError, match="not_run"):
        scoring(tmp_path, None, tmp_path / "sheet.csv")
    waiting = end(begin(tmp_path, "human_eval.judges=people"), human_eval="awaiting_labels")
    with pytest.raises(UserError, match="there is no such file"):
        scoring(tmp_path, None, tmp_path / "absent.csv")
    taken_up = scoring(tmp_path, None, tmp_path / "sheet.csv")
    assert taken_up.ctx.run == waiting
    assert taken_up.sources.sheet is not None


def test_a_run_that_an_earlier_version_imported_is_like_any_other(tmp_path: Path) -> None:
    run = finish(begin(tmp_path))
    path = tmp_path / "runs" / run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"imported": "2026-01-01T00:00:00+00:00"}))
    end(rerun(tmp_path, "ppo"))
    assert load_status(tmp_path).origin["from"] == run and set(list_runs(tmp_path)) > {run}
    assert "2026-01-01T00:00:00" in path.read_text(), "what an earlier version wrote is not lost"


def test_scoring_again_takes_the_sample_that_people_were_shown(tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_text("item\n")
    (tmp_path / "mended.csv").write_text("item\n1\n")
    finish(begin(tmp_path, "human_eval.judges=people"))
    finish(scoring(tmp_path, None, tmp_path / "sheet.csv"))
    pinned = scoring(tmp_path, None, tmp_path / "mended.csv").ctx.reuse.pinned
    assert pinned["human_eval.sample"].digest == pinned["human_eval"].inputs["sample"]


def test_a_fetched_model_is_named_shortly_and_a_folder_by_its_path(tmp_path: Path) -> None:
    named = load_config("tiny", [parse_override("sft.base=smollm2")])
    with pytest.raises(UserError, match="tether fetch smollm2"):
        find_sources(named, tmp_path)
    folder = tmp_path / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "weights.gguf").write_bytes(b"GGUF")
    assert find_sources(named, tmp_path).base["base"].path == folder
    by_path = load_config("tiny", [parse_override(f"sft.base={folder}")])
    assert find_sources(by_path, tmp_path / "elsewhere") == find_sources(named, tmp_path)
    assert find_sources(load_config("tiny"), tmp_path) == Sources()


def test_what_every_run_begins_with_imports_neither_pandas_nor_a_framework() -> None:
    """They take longer than all else that a run does whose results are in the store."""
    heavy = {"torch", "transformers", "datasets", "great_expectations", "mlflow", "prefect", "pandas"}
    told = f"import sys, flows.launch.begin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_for_a_gpu_is_refused_before_its_first_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused by SFT, after validate had read all data."""
    monkeypatch.setattr("components.models.runtime.usable_gpus", lambda: Gpus((), "none", "no driver"))
    launch = begin(tmp_path, "runtime.device=cuda")
    with pytest.raises(UserError, match=r"\(no driver\) does not fit the run: runtime\.device is cuda, and here"):
        compute(launch)
    assert not list_runs(tmp_path)
    monkeypatch.setattr("flows.launch.run_computing._go", lambda launch, work: None)
    pools = [f"runners.{stage}=gpu" for stage in ("sft", "reward", "ppo", "human_eval")]
    monkeypatch.setattr("tasks.prefect_flow.server.check_server", lambda **_: None)
    compute(begin(tmp_path, "runtime.device=cuda", *pools))  # its workers may have one
    validate = load_config("tiny", [parse_override("runtime.device=cuda")]).resolved()
    compute(new_run(tmp_path, "tiny", validate, request=Request(until="validate")))


def test_a_run_that_ends_before_ppo_needs_no_reward_source(tmp_path: Path) -> None:
    config = load_config("tiny", [parse_override("ppo.rewards=[{source: 'function:absent:score'}]")]).resolved()
    assert end(new_run(tmp_path, "tiny", config, request=Request(until="reward")))
    with pytest.raises(UserError, match="there is no module absent"):
        new_run(tmp_path, "tiny", config, request=Request(until="ppo"))


def test_a_comparisons_config_can_be_read_again(tmp_path: Path) -> None:
    """Its gates are those on raters, so an alarm that stops a training has no limit there."""
    home, models = tmp_path / "home", []
    finish(begin(home, "policy.method=dpo", "policy.stop_on_alarm=true", "gates.policy.chosen_log_ratio=-20"))
    for name in ("one", "other"):
        models.append(str(tmp_path / name))
        Path(models[-1]).mkdir()
        (Path(models[-1]) / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "name": name}))
    run = end(compare(home, models, overrides=[parse_override("human_eval.judges=people")]))
    again = check_config(run_values(home, run), source=f"run {run}")
    assert again.policy.method == "dpo" and not again.policy.stop_on_alarm and again.chosen_limit is None


@pytest.mark.parametrize("label", ["label", "is_safe"])
def test_kto_is_refused_labels_beside_the_generators_pairs(label: str, tmp_path: Path) -> None:
    """Other methods, and SFT alone, do not train on the labels."""
    rows = [{"prompt": f"question {i}", "response": f"reply {i}", label: i % 3 > 0} for i in range(20)]
    labels = write(tmp_path / "kto.jsonl", rows)
    plain = write(tmp_path / "sft.jsonl", [{name: row[name] for name in ("prompt", "response")} for row in rows])
    home, given, kto = tmp_path / "home", f"data.demonstrations={labels}", "policy.method=kto"
    with pytest.raises(UserError, match=r"kto.jsonl has single labels, and data.preferences names no pairs"):
        begin(home, given, kto)
    assert not list_runs(home)
    for changes in ([given, "policy.method=dpo"], [kto, f"data.demonstrations={plain}"], [given]):
        end(begin(home, *changes))
    config = load_config("tiny", [parse_override(text) for text in (given, kto)]).resolved()
    end(new_run(home, "tiny", config, Request(until="sft")))
    preferences = write(tmp_path / "pairs.jsonl", pairs(0, 20))
    end(begin(home, given, kto, f"data.preferences={preferences}"))
