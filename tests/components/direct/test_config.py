"""Which options a method uses, and which of them are in a key."""

from typing import Any

import pytest
from pydantic import ValidationError

from components.base.errors import UserError
from components.base.nested import flatten
from components.base.settings import keyed_values
from components.direct.config import DirectJob, PolicyConfig
from components.gates.methods import ON_PAIRS, USED_BY, is_used
from components.gates.table import GATES
from components.ppo.config import KLConfig, PpoConfig
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from tasks.execution.keying import key_of
from tasks.stages import STAGES, stage_of
from tests.reference import option_names


def config(*changes: str) -> RunConfig:
    return load_config("tiny", [parse_override(change) for change in changes])


def key(*changes: str) -> str:
    made = config(*changes)
    stage = made.stage("ppo")
    return key_of(stage, made.stage_job(stage), {})[0]


def options(*changes: str) -> set[str]:
    made = config(*changes)
    return set(flatten(keyed_values(made.stage_job(STAGES["ppo"]))))


def test_names_of_options_are_those_of_the_classes() -> None:
    gates = {f"gates.{name}" for name in GATES}
    assert USED_BY.keys() - gates - {"gates.ppo"} <= option_names()
    used = {name for name in PpoConfig.model_fields if is_used("dpo", f"ppo.{name}")}
    limits = {name for name in KLConfig.model_fields if is_used("dpo", f"ppo.kl.{name}")}
    measuring = {"evaluate", "repeats", "rules", "rewards", "score", "watch", "evaluate_temperature", "best_of", "kl"}
    assert used == measuring and not is_used("dpo", "ppo.score.length_penalty")
    assert limits == {"band", "ceiling", "unit", "response_ceiling"}


@pytest.mark.parametrize("method", ON_PAIRS)
def test_a_key_has_the_methods_own_options_only(method: str) -> None:
    names = options(f"policy.method={method}")
    assert {name for name in names if not is_used(method, name)} == set()
    assert {"policy.method", "policy.beta", "ppo.evaluate", "ppo.kl.band"} <= names
    assert {"ppo.updates", "ppo.kl.target", "policy.checkpoint_every"} & names == set()
    assert ("policy.margin" in names) == (method == "dpo")
    assert ("policy.desirable_weight" in names) == (method == "kto")


def test_ppos_key_has_no_policy() -> None:
    assert not any(name.startswith("policy") for name in options())
    assert config().stage("ppo") is STAGES["ppo"]


def test_an_option_of_ppo_in_the_profile_changes_no_direct_key(tmp_path: Any) -> None:
    profile = tmp_path / "longer.yaml"
    profile.write_text("extends: tiny\nppo: {updates: 9}\npolicy: {desirable_weight: 2}\n")
    longer = load_config(profile, [parse_override("policy.method=dpo")])
    stage = longer.stage("ppo")
    assert key_of(stage, longer.stage_job(stage), {})[0] == key("policy.method=dpo")
    assert key("policy.method=dpo", "policy.beta=0.2") != key("policy.method=dpo") != key("policy.method=ipo")
    assert key("policy.method=dpo", "ppo.evaluate=64") != key("policy.method=dpo")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["policy.method=dpo", "ppo.updates=9"], "ppo.updates has no effect with policy.method=dpo"),
        (["policy.method=dpo", "ppo.kl.target=2"], "ppo.kl.target has no effect with policy.method=dpo"),
        (["policy.method=kto", "policy.margin=1"], "policy.margin has no effect with policy.method=kto"),
        (["policy.beta=0.3"], "policy.beta has no effect with policy.method=ppo"),
        (["policy.method=cpo"], "policy.method = cpo: must be 'ppo', 'online_dpo', 'dpo', 'ipo', 'kto' or 'best_of_n'"),
        (["policy.method=online_dpo", "ppo.clip_range=0.1"], "ppo.clip_range has no effect with policy.method="),
        (["policy.method=online_dpo", "ppo.kl.form=k2"], "ppo.kl.form has no effect with policy.method=online_dpo"),
        (
            ["policy.method=online_dpo", "ppo.minibatch_size=1", "ppo.micro_batch_size=1"],
            "minibatch_size (1) to an even number",
        ),
        (["ppo.pair_labels=hard"], "ppo.pair_labels has no effect with policy.method=ppo"),
        (["policy.method=best_of_n", "policy.beta=1"], "policy.beta has no effect with policy.method=best_of_n"),
        (["policy.method=best_of_n", "policy.stop_on_alarm=true"], "policy.stop_on_alarm has no effect with"),
        (
            ["policy.method=dpo", "policy.stop_on_alarm=true", "gates.policy.chosen_log_ratio=null"],
            "the number of gates.policy.chosen_log_ratio, which is null: set it",
        ),
        (["policy.method=dpo", "policy.lora.rank=4"], "policy.lora: the reward model shares"),
        (["policy.method=dpo", "policy.evaluate_every=null", "ppo.watch.patience=2"], "set policy.evaluate_every"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(changes: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        config(*changes)
    assert named in str(caught.value)


def test_a_file_that_chooses_a_method_may_not_set_ppos_options(tmp_path: Any) -> None:
    profile, later = tmp_path / "dpo.yaml", tmp_path / "later.yaml"
    profile.write_text("extends: tiny\npolicy: {method: dpo}\nppo: {epochs: 3}\n")
    with pytest.raises(UserError, match=r"dpo.yaml: ppo.epochs has no effect with policy.method=dpo"):
        load_config(profile)
    profile.write_text("extends: tiny\npolicy: {method: dpo}\n")
    later.write_text("extends: ./dpo.yaml\nppo: {epochs: 3}\n")
    with pytest.raises(UserError, match=r"later.yaml: ppo.epochs has no effect with policy.method=dpo"):
        load_config(later)
    assert load_config(profile, [parse_override("policy.method=ppo"), parse_override("ppo.epochs=3")]).ppo.epochs == 3


def test_a_band_may_be_below_the_target_of_a_controller_that_is_not_used() -> None:
    made = load_config("demo", [parse_override("policy.method=dpo"), parse_override("ppo.kl.band=2")])
    assert made.ppo.kl.band == 2 < made.ppo.kl.target


def test_a_job_is_read_back_from_its_key() -> None:
    made = config("policy.method=dpo", "ppo.kl.band=2", "policy.soft_labels=true")
    values = keyed_values(made.stage_job(STAGES["ppo"]))
    again = stage_of("ppo", values).load_job().model_validate(values)
    assert isinstance(again, DirectJob) and keyed_values(again) == values
    assert again.measured.ppo.kl.band == 2 and not again.measured.ppo.has_critic


def test_a_gates_number_is_the_alarms_and_in_the_key_only_if_it_stops() -> None:
    dpo, gate, stops = "policy.method=dpo", "gates.policy.chosen_log_ratio=-7", "policy.stop_on_alarm=true"
    made = config(dpo, gate)
    assert made.stage_job(STAGES["ppo"]).chosen_limit == -7 and config(dpo).chosen_limit == -5  # type: ignore[attr-defined]
    assert config(dpo, "gates.policy.chosen_log_ratio=null").chosen_limit is None
    assert key(dpo, gate) == key(dpo)
    assert len({key(dpo), key(dpo, stops), key(dpo, stops, gate)}) == 3


def test_auto_takes_the_estimate_of_validate() -> None:
    made = config("policy.method=dpo", "policy.label_smoothing=auto", "policy.form=robust")
    assert made.with_label_noise({"data/label_noise": 0.12}).policy.noise == 0.12
    with pytest.raises(UserError, match=r"policy.label_smoothing is auto, and validate has no estimate"):
        made.with_label_noise({})
    other = config("policy.method=kto")
    assert other.with_label_noise({}) is other
    with pytest.raises(ValidationError):
        PolicyConfig(method="dpo", label_smoothing=0.5)


def test_ppos_gates_are_off_for_another_method_with_a_reason() -> None:
    gates = config("policy.method=dpo").effective_gates
    off = {gate.name for gate, threshold in gates.rules("ppo") if gate.group == "ppo" and threshold is None}
    assert off >= {"ppo.ratio_max", "ppo.clip_fraction_max"} and "ppo.stopped" not in off
    assert gates.reasons["ppo.ratio_max"] == "policy.method=dpo has no PPO updates"
    assert not config().effective_gates.reasons


def test_online_dpo_keeps_ppos_options_and_drops_those_of_its_loss() -> None:
    made = config("policy.method=online_dpo", "ppo.kl.coefficient=0.4", "ppo.pair_labels=hard")
    assert made.stage("ppo") is STAGES["ppo"] and made.ppo.kl.coefficient == 0.4 and made.ppo.pair_labels == "hard"
    assert made.ppo.advantage == "rloo" and made.ppo.together == made.ppo.group_size == 2 and not made.ppo.has_critic
    assert config("policy.method=online_dpo").ppo.pair_labels == "soft"
    demo = load_config("demo", [parse_override("policy.method=online_dpo")])
    assert demo.ppo.kl == load_config("demo").ppo.kl
    assert key("policy.method=online_dpo") != key()
    assert set(config("policy.method=online_dpo").effective_gates.reasons) == {"ppo.ratio_max", "ppo.clip_fraction_max"}
    with pytest.raises(ValidationError, match="go together"):
        RunConfig.model_validate(config().model_dump() | {"policy": {"method": "online_dpo"}})


def test_limits_of_a_direct_method_leave_ppos_controller_as_it_was(tmp_path: Any) -> None:
    profile = tmp_path / "dpo.yaml"
    profile.write_text("extends: demo\npolicy: {method: dpo}\nppo: {kl: {band: 2, ceiling: 2.5}}\n")
    assert load_config(profile).ppo.kl.band == 2
    with pytest.raises(UserError, match=r"ppo.kl: band \(2\) must be greater than target \(3\)"):
        load_config(profile, [parse_override("policy.method=ppo")])
    wider = [parse_override(option) for option in ("policy.method=ppo", "ppo.kl.band=6", "ppo.kl.ceiling=9")]
    assert load_config(profile, wider).ppo.kl.control == "adaptive"


def test_another_method_follows_online_dpo(tmp_path: Any) -> None:
    profile = tmp_path / "online.yaml"
    profile.write_text("extends: tiny\npolicy: {method: online_dpo}\n")
    for method in ("ppo", "dpo"):
        later = load_config(profile, [parse_override(f"policy.method={method}")])
        assert later.ppo.pair_labels is None and later.ppo.advantage == "gae" and later.ppo.group_size == 1


def test_a_direct_method_asks_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_VLLM_URL", "http://127.0.0.1:9")
    changes = [parse_override(option) for option in ("policy.method=dpo", "runtime.device=cpu")]
    assert load_config("gpu", changes).resolved().ppo.rollout.engine == "auto"


def test_a_config_that_was_printed_is_read_again() -> None:
    for method in ("online_dpo", "best_of_n"):
        made = config(f"policy.method={method}")
        assert RunConfig.model_validate(made.model_dump()) == made


def test_best_of_ns_key_has_its_own_options_only() -> None:
    names = options("policy.method=best_of_n")
    assert {"policy.n", "policy.rounds", "policy.epochs", "ppo.score.clip"} <= names
    assert {"policy.beta", "policy.soft_labels", "ppo.updates"} & names == set()


def test_a_run_that_ends_before_ppo_asks_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_VLLM_URL", "http://127.0.0.1:9")
    changes = [parse_override("runtime.device=cpu")]
    assert load_config("gpu", changes).resolved(with_ppo=False).ppo.rollout.version == "auto"
