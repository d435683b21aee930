"""What people look at first, and by what names and words."""

from components.gates.gate import Gate
from components.gates.table import GATES, MAIN_METRICS, MainMetric, brief_metrics

BRIEF = {
    "validate": ["data/pairs", "data/quarantined", "data/model_votes", "data/annotator_agreement"],
    "sft": ["sft/loss", "sft/perplexity", "sft/gold", "sft/violations"],
    "reward": ["reward/accuracy", "reward/accuracy_low", "reward/ece", "reward/test_pairs", "reward/judge_accuracy"],
    "ppo": [
        "policy/proxy_reward", "policy/kl", "policy/kl_per_token", "policy/judge_gain", "policy/gold",
        "policy/violations", "policy/rule_violations",
    ],
    "evaluation": [
        f"evaluation/{gate}_high"
        for gate in ("task_drop", "over_refusal", "harmful", "false_premises", "over_promising", "other_probes")
    ],
    "human_eval": [
        "human_eval/win_rate", "human_eval/win_rate_low", "human_eval/reward_agreement", "human_eval/fleiss_kappa",
    ],
}  # fmt: skip


def test_a_line_shows_a_stages_few_main_metrics_that_it_recorded_and_no_others() -> None:
    assert {s: brief_metrics(s, [m.name for m in metrics]) for s, metrics in MAIN_METRICS.items()} == BRIEF
    recorded = ["policy/violations", "policy/entropy", "policy/kl"]
    assert brief_metrics("ppo", recorded) == ["policy/kl", "policy/violations"]
    of_sources = ["data/pairs_from/b", "data/pairs_train", "data/quarantined", "data/pairs", "data/pairs_from/a"]
    shown = ["data/pairs", "data/pairs_from/a", "data/pairs_from/b", "data/quarantined"]
    assert brief_metrics("validate", of_sources) == shown, "of several sources each"


def test_a_stage_that_the_table_does_not_list_shows_its_own_first_four() -> None:
    recorded = ["dpo/e", "dpo/c", "ppo/kl", "dpo/a", "dpo/d", "dpo/b"]
    assert brief_metrics("dpo", recorded) == ["dpo/a", "dpo/b", "dpo/c", "dpo/d"]


def test_a_card_shows_all_but_what_only_the_run_is_about() -> None:
    left_out = {m.name for metrics in MAIN_METRICS.values() for m in metrics if not m.card}
    assert left_out == {
        "data/pairs", "data/quarantined", "data/model_votes", "data/annotator_agreement", "reward/accuracy_low",
        "reward/test_pairs", "data/overlong", "data/label_noise", "policy/proxy_reward", "human_eval/win_rate_low",
        "human_eval/always_valid_low", "human_eval/always_valid_low_of_people", "human_eval/raters",
        "human_eval/reward_auroc",
    }  # fmt: skip


def test_words_and_unit_make_a_metrics_text() -> None:
    assert MainMetric("x/kl", "KL to the SFT model", "nats a token").text == "KL to the SFT model, nats a token"
    assert MainMetric("x/kl", "KL to the SFT model").text == "KL to the SFT model"


def test_a_gates_name_gives_its_stage_its_key_and_where_none_is_named_its_metric() -> None:
    gate = Gate("ppo.kl.per_token", "<=", "")
    assert (gate.stage, gate.short, gate.metric) == ("ppo", "kl.per_token", "ppo/kl.per_token")
    assert Gate("policy.kl", "<=", "", "policy/kl_high").metric == "policy/kl_high"
    assert {GATES[name].stage for name in GATES if name.startswith("policy.")} == {"ppo"}


def test_a_gate_judges_an_end_of_an_interval_what_chance_reaches_or_says_why_not() -> None:
    assert [
        gate.name
        for gate in GATES.values()
        if gate.interval == "end" and not (gate.metric.endswith(("_low", "_high")) or gate.or_within or gate.warn_only)
    ] == []


def test_a_lower_end_must_be_above_its_threshold_and_an_upper_end_below() -> None:
    assert {gate.op for gate in GATES.values() if gate.metric.endswith("_low")} == {">=", ">"}
    assert {gate.op for gate in GATES.values() if gate.metric.endswith("_high")} == {"<="}
