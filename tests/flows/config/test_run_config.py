"""The composed config: profiles are valid, jobs hold what they name, and errors name key, value and nearest key."""

import copy
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.base.settings import keyed_values
from components.gates.table import GATES
from components.ppo.config import CriticConfig
from data_contracts.config import JudgeData, TokenizerConfig
from flows.config import profiles, run_config
from flows.config import yaml as yaml_text
from flows.config.config_errors import nearest, valid_keys
from flows.config.profiles import Override, apply_overrides, parse_override, profile_names
from flows.config.removed import REMOVED, without_removed
from flows.config.run_config import RunConfig, check_config, check_kl_limits, load_config, to_values
from tasks.stages import PIPELINE, STAGES

BOOLEANS = {
    "tf32", "gradient_checkpointing", "train", "shared_prompts", "batch_invariant",
    "sleep", "stop_early", "streaming", "cuda_graphs", "promote", "chat_template",
}  # fmt: skip
"""Last parts of the options that are booleans."""
EXTRA = {"metric": "policy/entropy", "op": ">=", "threshold": 0.2}
NOT_FINITE = (".inf", ".nan", "[0.2, .inf]", "{a: .inf}")


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_is_valid_and_judges_every_stage(name: str) -> None:
    judged = {gate.stage for gate, threshold in load_config(name).gates.rules() if threshold is not None}
    assert judged == set(PIPELINE)


@pytest.mark.parametrize("name", profile_names())
def test_what_show_config_prints_is_the_same_config(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "shown.yaml"
    path.write_text(yaml_text.dump(to_values(config)))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo.clip_range=-0.2", "tiny: ppo.clip_range = -0.2: must be greater than 0."),
        ("ppo.clip_rnage=0.2", "ppo.clip_rnage = 0.2: no such key; did you mean ppo.clip_range?"),
        ("poo.kl.target=5", "poo.kl.target = 5: no such key; did you mean ppo.kl.target?"),
        ("kl.target=5", "kl.target = 5: no such key; did you mean ppo.kl.target?"),
        ("seeed=5", "seeed = 5: no such key; did you mean seed?"),
        ("gates.ppo.kll=8", "gates.ppo.kll = 8: no such key; did you mean gates.policy.kl?"),
        ("gates.poo.kl=8", "gates.poo.kl = 8: no such key; did you mean gates.policy.kl?"),
        ("gates.policy.kl=[1, 2]", "gates.policy.kl is [1, 2]"),
        ("seed=x", "seed = x: must be a valid integer"),
        ("seed=true", "seed = true: true and false are not numbers; write a number"),
        ("data.sources={preferences: {weight: true}}", "data.sources.preferences.weight = true: true and false"),
        ("prices.hour={cpu: true}", "prices.hour: true and false are not numbers"),
        ("seed=-1", "seed = -1: must be greater than or equal to 0"),
        ("sft.scratch=5", "sft.scratch = 5: must be a group of keys"),
        ("ppo.kl.control=adaptve", "ppo.kl.control = adaptve: must be 'fixed' or 'adaptive'"),
        ("data.split.train=0.9", "data.split: train, calibration and test must sum to 1"),
        ("generation.top_p=0.9", "generation.top_p = 0.9: no such key"),
        (
            "data.checks.length_preference.threshold=[0.2, .inf]",
            "data.checks.length_preference.threshold.1 = inf: must be a finite number",
        ),
        ("sft.learning_rate=fast", "sft.learning_rate = fast: must be a valid number"),
        *(
            (f"data.sources={{a: {{weight: {value}}}}}", f"data.sources.a.weight = {value.strip('.')}: must be {rule}")
            for value, rule in (
                ("0", "between 0.001 and 1000; to use none of a source's pairs, take it out of data.preferences"),
                ("-2", "between 0.001 and 1000"),
                ("1001", "between"),
                (".nan", "a finite"),
                (".inf", "a finite"),
            )
        ),
        ("data.sources={a: {max_pairs: 9}}", "data.sources.a.max_pairs = 9: must be greater than or equal to 10"),
        ("data.sources={a: {share: 1}}", "data.sources.a: takes weight and max_pairs, and not share"),
        ("data.sources.a.jsonl.weight=2", "and not jsonl. Write a name that has a dot inside the value: --set"),
        ("data.preferences=''", "data.preferences = : a path is empty; is a shell variable not set?"),
        ("data.judge_preferences=[a, ' ']", "data.judge_preferences = ['a', ' ']: a path is empty"),
        ("data.prompts=''", "data.prompts = : a path is empty"),
    ],
)
def test_a_mistake_is_named_with_key_value_and_what_would_do(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("tiny", [parse_override(override)])
    assert said in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_option_takes_a_number_that_no_key_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = profiles.read_profile("tiny")  # once, for a thousand configs
    monkeypatch.setattr(run_config, "read_profile", lambda _: copy.deepcopy(tiny))
    taken = []
    for override in (f"{key}={value}" for key in valid_keys(RunConfig) for value in NOT_FINITE):
        with suppress(UserError):
            config = load_config("tiny", [parse_override(override)])
            try:
                digest_json([keyed_values(config.stage_job(stage)) for stage in STAGES.values()])
            except ValueError:
                taken.append(override)
    assert taken == []


def test_no_option_reads_true_as_the_number_1(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = profiles.read_profile("tiny")  # once, for a thousand configs
    monkeypatch.setattr(run_config, "read_profile", lambda _: copy.deepcopy(tiny))
    taken = set()
    for key in valid_keys(RunConfig):
        for value in ("true", "[true, true]", "{a: true}"):
            with suppress(UserError):
                load_config("tiny", [parse_override(f"{key}={value}")])
                taken.add(key.rpartition(".")[2])
    assert taken == BOOLEANS


def test_several_mistakes_stand_in_one_paragraph() -> None:
    with pytest.raises(UserError) as caught:
        load_config("tiny", [parse_override("ppo.clip_range=-1"), parse_override("sft.epochs=0")])
    assert "sft.epochs = 0" in str(caught.value)
    assert "ppo.clip_range = -1" in str(caught.value)


def test_a_worst_case_of_several_reward_models_needs_several_in_the_artifact() -> None:
    options = ["reward.members=2", "ppo.score.ensemble=minimum"]
    assert load_config("tiny", map(parse_override, options)).reward.members == 2
    with pytest.raises(UserError, match=r"set reward\.members to 2 or more"):
        load_config("tiny", map(parse_override, options[1:]))


@pytest.mark.parametrize("option", REMOVED)
def test_a_removed_option_is_dropped_at_its_default_and_else_refused(option: str) -> None:
    default, advice = REMOVED[option]
    assert option not in valid_keys(RunConfig)
    plain = to_values(load_config("tiny"))
    old = apply_overrides(plain, [Override(tuple(option.split(".")), default)])
    assert old != plain and check_config(old, "run r1") == check_config(plain, "run r1")
    assert RunConfig.model_validate(old) == RunConfig.model_validate(plain), "a deployment of an earlier release runs"
    with pytest.raises(UserError) as refused:
        load_config("tiny", [parse_override(f"{option}=7")])
    assert str(refused.value) == f"tiny: {option} = 7: this option is gone. {advice}"


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["ppo.kl.unit=token"], "ppo.kl.band"),
        (["ppo.kl.unit=token", "gates.policy.kl=null"], "ppo.kl.band"),
        (["ppo.kl.unit=token", "gates.policy.kl_per_token=null"], "gates.policy.kl_per_token"),
        (["gates.policy.kl=null", "gates.policy.kl_per_token=0.2"], "gates.policy.kl"),
        (["ppo.kl.unit=token", "gates.policy.kl_per_token=0.2"], None),
        (["ppo.kl.unit=token", "gates.policy.kl_per_token=0.2", "gates.policy.kl=null"], None),
        (["gates.policy.kl=null"], None),
    ],
)
def test_kl_that_is_aimed_at_in_one_unit_is_not_judged_in_the_other_alone(
    options: list[str], refused: str | None
) -> None:
    if refused is None:
        load_config("tiny", map(parse_override, options))
    else:
        with pytest.raises(UserError, match=r"gates\.policy\.kl\w*: ppo\.kl\.unit .* no gate would judge KL") as error:
            load_config("tiny", map(parse_override, options))
        assert f"set {refused}, as in --set {refused}=" in str(error.value)


@pytest.mark.parametrize("profile", ["demo", "hh-smollm2"])
def test_without_a_critic_a_profiles_critic_options_are_left_out_and_ones_own_are_refused(
    profile: str, tmp_path: Path
) -> None:
    without = ["ppo.advantage=rloo", "ppo.group_size=4"]
    assert load_config(profile).ppo.critic != CriticConfig()
    assert load_config(profile, map(parse_override, without)).ppo.critic == CriticConfig()
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: {profile}\nppo: {{advantage: grpo, group_size: 4}}\n")
    assert load_config(own).ppo.critic == CriticConfig()
    assert load_config(own, [parse_override("ppo.critic.kind=separate")]).ppo.critic == CriticConfig(), "the default"
    refused = r"ppo\.critic\.learning_rate \(0\.003\) has no effect, because ppo\.advantage=\w+ has no critic"
    for given, *options in ((profile, *without), (own,)):
        with pytest.raises(UserError, match=refused):
            load_config(given, map(parse_override, [*options, "ppo.critic.learning_rate=0.003"]))
    own.write_text("ppo: {advantage: rloo, group_size: 4, critic: {kind: shared}}\n")
    with pytest.raises(UserError, match=r"own\.yaml: ppo\.critic\.kind \(shared\) has no effect"):
        load_config(own)


def test_options_of_another_kind_of_critic_are_left_out_of_a_profile_and_ones_own_are_refused(tmp_path: Path) -> None:
    shared, separate = CriticConfig(kind="shared"), CriticConfig(kind="separate")
    assert load_config("demo").ppo.critic.learning_rate is not None
    assert load_config("demo", [parse_override("ppo.critic.kind=shared")]).ppo.critic == shared
    assert load_config("hh-smollm2", [parse_override("ppo.critic.kind=separate")]).ppo.critic == separate
    own = tmp_path / "own.yaml"
    for kind, option, needed in (
        ("shared", "learning_rate: 0.003", "separate"), ("shared", "start: sft", "separate"),
        ("separate", "coefficient: 0.1", "shared"),
    ):  # fmt: skip
        own.write_text(f"extends: demo\nppo: {{critic: {{kind: {kind}, {option}}}}}\n")
        refused = (
            rf"own\.yaml: ppo\.critic\.{option.split(':')[0]} .* has no effect, .* use ppo\.critic\.kind={needed}\."
        )
        with pytest.raises(UserError, match=refused):
            load_config(own)
        own.write_text(f"extends: demo\nppo: {{critic: {{kind: {needed}, {option}, warmup: 2}}}}\n")
        assert load_config(own).ppo.critic.warmup == 2


def kl_gates(config: RunConfig) -> dict[str, Any]:
    """The thresholds of both gates on KL."""
    return {gate.short: threshold for gate, threshold in config.effective_gates.rules("ppo") if gate.short[:2] == "kl"}


@pytest.mark.parametrize("name", profile_names())
def test_a_profiles_gate_on_kl_takes_the_band_below_the_ceiling(name: str) -> None:
    config = load_config(name)
    kl, gates = config.ppo.kl, kl_gates(config)
    assert (gates["kl"], gates["kl_per_token"]) == (kl.band, None) and kl.band is not None and kl.ceiling is not None
    assert kl.target < kl.band < kl.ceiling and not config.effective_gates.unnamed


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (["ppo.kl.band=8"], (8, None)),
        (["ppo.kl.band=8", "gates.policy.kl=7"], (7, None)),
        (["gates.policy.kl=null"], (None, None)),
        (["ppo.kl.unit=token", "ppo.kl.target=0.1", "ppo.kl.band=0.2"], (None, 0.2)),
        (["ppo.watch.kl_high=8"], (8, None)),
    ],
)
def test_the_gate_on_kl_takes_the_band_unless_it_is_set(options: list[str], limits: tuple[Any, Any]) -> None:
    gates = kl_gates(load_config("demo", map(parse_override, options)))
    assert (gates["kl"], gates["kl_per_token"]) == limits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gates.policy.kl=8"], r"gates\.policy\.kl \(8\) is above ppo\.kl\.band \(6\.5\).* --set ppo\.kl\.band=8,"),
        (["ppo.kl.band=12"], r"ppo\.kl\.band \(12\) is above ppo\.kl\.ceiling \(9\).* --set ppo\.kl\.ceiling=12,"),
        (["ppo.kl.band=null", "gates.policy.kl=12"], r"gates\.policy\.kl \(12\) is above ppo\.kl\.ceiling \(9\)"),
        (["gates.policy.kl=10"], r"\(10\) is above ppo\.kl\.band .* --set ppo\.kl\.band=10 --set ppo\.kl\.ceiling=10,"),
        (["ppo.kl.band=3"], r"band \(3\) must be greater than target \(3\)"),
        (["ppo.kl.stop_above=7", "ppo.kl.ceiling=8"], "ppo.kl.stop_above is called ppo.kl.ceiling now, and both"),
    ],
)
def test_limits_of_kl_that_contradict_each_other_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config("demo", map(parse_override, options))


def test_a_stored_runs_limits_are_compared_only_where_a_rerun_changes_one() -> None:
    """An earlier release ran `--set gates.ppo.kl=8` under a band of 6.5."""
    values = apply_overrides(to_values(load_config("demo")), [parse_override("gates.policy.kl=8")])
    stored = check_config(values, "run r1")
    for option in ("ppo.kl.coefficient=0.2", "gates.policy.ended=0.5", "ppo.kl.target=2.5"):
        check_kl_limits(check_config(apply_overrides(values, [parse_override(option)]), "--set"), "run r1", stored)
    changed = check_config(apply_overrides(values, [parse_override("ppo.kl.band=7")]), "--set")
    with pytest.raises(UserError, match=r"run r1: gates\.policy\.kl \(8\) is above ppo\.kl\.band \(7\)"):
        check_kl_limits(changed, "run r1", stored)


def test_former_names_of_options_keep_working(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("extends: demo\nppo: {kl: {stop_above: 8}, watch: {kl_high: 5, prompts: 9}}\n")
    config = load_config(own)
    assert (config.ppo.kl.band, config.ppo.kl.ceiling, config.ppo.watch.prompts) == (5, 8, 9)
    assert caplog.messages == [
        f"{own}: ppo.kl.stop_above is called ppo.kl.ceiling now, ppo.watch.kl_high is called ppo.kl.band now. "
        "The old names still work."
    ]
    caplog.clear()
    stored = to_values(config)
    kl, watch = stored["ppo"]["kl"], stored["ppo"]["watch"]
    kl["stop_above"], watch["kl_high"] = kl.pop("ceiling"), kl.pop("band")
    assert check_config(stored, "run r1") == config == RunConfig.model_validate(stored), "as an older run stored it"
    changes = [parse_override("ppo.kl.band=6")]
    changed = check_config(apply_overrides(without_removed(stored, "run r1"), changes), "run r1")
    assert changed.ppo.kl.band == 6 and caplog.messages == []


def test_objectives_are_named_in_the_config_and_enter_the_key() -> None:
    config = load_config("tiny", map(parse_override, ["reward.objectives.helpful=1", "reward.objectives.brief=0.5"]))
    assert config.reward.objectives == {"helpful": 1.0, "brief": 0.5} and config.reward.heads == ("brief", "helpful")
    assert keyed_values(config.reward)["objectives"] == {"helpful": 1.0, "brief": 0.5}


def test_a_config_without_gates_has_them_all_off() -> None:
    assert check_config({"seed": 1}, "mine.yaml").gates.unnamed == list(GATES)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"poo": {"mine": EXTRA}}, "mine.yaml: gates.extra.poo: no such stage; there are validate, sft,"),
        ({"ppo": {"mine": {**EXTRA, "op": "=>"}}}, "gates.extra.ppo.mine.op = =>: must be '<=', '>=',"),
        ({"ppo": {"mine": {"metric": "ppo/x", "op": ">="}}}, "gates.extra.ppo.mine.threshold: is required"),
        ({"ppo": {"mine": {**EXTRA, "treshold": 1}}}, "did you mean gates.extra.ppo.mine.threshold?"),
        (
            {"ppo": {"mine": {**EXTRA, "threshold": [1, 2]}}},
            "gates.extra.ppo.mine.threshold is [1, 2]: this gate",
        ),
        (
            {"ppo": {"kl": EXTRA}},
            "gates.extra.ppo.kl is a built-in gate's name: choose another, or set gates.policy.kl",
        ),
        ({"ppo": {"mine": 5}}, "gates.extra.ppo.mine = 5: must be a group of keys"),
        ([{"name": "ppo.mine"}], "gates.extra = [{'name': 'ppo.mine'}]: must be a group of keys"),
    ],
)
def test_a_mistake_in_an_extra_gate_says_what_to_write(values: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_config({"gates": {"extra": values}}, "mine.yaml")
    assert said in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_extra_gates_are_merged_by_name_from_profiles_and_options(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text(yaml_text.dump({"extends": "tiny", "gates": {"extra": {
        "ppo": {"mine": EXTRA, "yours": EXTRA}, "sft": {"mine": EXTRA}}}}))  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml_text.dump({"extends": "./team.yaml", "gates": {"extra": {
        "ppo": {"mine": {"threshold": 3}, "yours": None}}}}))  # fmt: skip
    config = load_config(tmp_path / "own.yaml", [parse_override("gates.extra.sft.mine.threshold=4")])
    extra = {gate.name: (gate.metric, threshold) for gate, threshold in config.gates.rules() if gate.name not in GATES}
    assert extra == {"ppo.mine": ("policy/entropy", 3), "sft.mine": ("policy/entropy", 4)}
    assert check_config(to_values(config), "itself") == config


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_a_stages_job_is_made_of_the_runs_own_groups(stage) -> None:
    config = load_config("tiny", [parse_override("seed=77")]).resolved()
    job = config.job(stage.load_job())
    assert job.seed == 77
    sft = config.sft
    tokenizer = TokenizerConfig(vocabulary=sft.scratch.vocabulary, max_demonstrations=sft.max_demonstrations)
    reduced: dict[tuple[str, str], Any] = {(name, "sft"): tokenizer for name in ("validate", "validate.judge")}
    reduced["validate.judge", "data"] = JudgeData.model_validate(config.data)
    for name in type(job).model_fields:
        assert getattr(job, name) == reduced.get((stage.name, name), getattr(config, name))


def test_no_threshold_is_in_any_key() -> None:
    config = load_config("tiny")
    for stage in STAGES.values():
        assert "gates" not in keyed_values(config.job(stage.load_job()))


SERVED = tuple(
    f"ppo.rollout.{each}" for each in ("engine=vllm", "version=0.29.0", "dtype=float32", "batch_invariant=true")
)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SERVED, None),
        (
            (*SERVED, "ppo.rollout.concurrency=2", "ppo.rollout.timeout=300"),
            r"^ppo\.rollout: 16 responses, 2 at a time, may take 2400 s .* wait 1800 s .*runtime\.rank_timeout or",
        ),
        (("reward.optimizer=adamw_8bit",), r"^reward\.optimizer: .*runtime\.sharding=replicas"),
        (("reward.optimizer=adamw_8bit", "runtime.sharding=replicas"), None),
        (("reward.optimizer=adamw_8bit", "reward.lora.rank=2"), None),
    ],
    ids=["served", "slow server", "sharded", "replicas", "adapter"],
)
def test_a_stage_that_would_refuse_its_ranks_after_the_stages_before_it_is_refused_when_the_run_begins(
    options: tuple[str, ...], said: str | None
) -> None:
    config = load_config("tiny", [parse_override(each) for each in (*options, "runtime.device=cpu")])
    config.resolved()  # with one rank everything goes
    ranks = load_config("tiny", [parse_override(each) for each in (*options, "runtime.device=cpu", "runtime.ranks=2")])
    if said is None:
        assert ranks.resolved().runtime.ranks == 2
        return
    with pytest.raises(UserError, match=said):
        ranks.resolved()


def test_nearest_prefers_the_same_group() -> None:
    keys = list(valid_keys(RunConfig))
    assert nearest("reward.learning_rat", keys) == "reward.learning_rate"
    assert nearest("ppo.critic.learning_rat", keys) == "ppo.critic.learning_rate"
    assert nearest("ppo.kll.targt", keys) == "ppo.kl.target"
    assert nearest("generation.xyzzy", keys) != "generation"
    assert nearest("xyzzy", keys) is None


def test_every_option_has_a_docstring() -> None:
    def undocumented(model, prefix=""):
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields") and inner.__name__ != "GatesConfig":
                yield from undocumented(inner, f"{prefix}{name}.")
            if not field.description:
                yield prefix + name

    assert list(undocumented(RunConfig)) == []


def test_every_options_pattern_is_one_that_prefects_form_takes() -> None:
    schema = RunConfig.model_json_schema()
    patterns = re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', json.dumps(schema))
    assert patterns and [re.compile(json.loads(pattern)) for pattern in patterns]


def test_a_stage_has_the_price_of_its_pool_else_of_its_device_and_prices_are_in_no_key():
    priced = ["prices.hour.cpu=0.1", "prices.hour.gpu=2", "prices.hour.cuda=3", "runtime.device=cpu", "runners.ppo=gpu",
              "runners.reward={pool: big, runtime: {device: cuda}}"]  # fmt: skip
    config = load_config("tiny", [parse_override(each) for each in priced])
    assert config.hourly_prices == {"validate": 0.1, "sft": 0.1, "reward": 3, "ppo": 2, "human_eval": 0.1}
    assert load_config("tiny").hourly_prices == {}
    plain = load_config("tiny", [parse_override(each) for each in priced if not each.startswith("prices")])
    for stage in STAGES.values():
        assert config.stage_job(stage) == plain.stage_job(stage), "a price would compute everything anew"
    with pytest.raises(UserError, match=r"prices\.hour\.cpu"):
        load_config("tiny", [parse_override("prices.hour.cpu=-1")])
