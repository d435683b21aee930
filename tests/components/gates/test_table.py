"""What people look at first, and by what names and words."""

from components.gates.table import GATES, MAIN_METRICS, Gate, MainMetric, brief_metrics

BRIEF = {
    "validate": ["data/pairs", "data/quarantined", "data/model_votes", "data/annotator_agreement"],
    "sft": ["sft/loss", "sft/perplexity", "sft/gold", "sft/violations"],
    "reward": ["reward/accuracy", "reward/accuracy_low", "reward/ece", "reward/test_pairs", "reward/judge_accuracy"],
    "ppo": [
        "ppo/proxy_reward", "ppo/kl", "ppo/kl_per_token", "ppo/judge_gain", "ppo/gold", "ppo/violations",
        "ppo/rule_violations",
    ],
    "human_eval": [
        "human_eval/win_rate", "human_eval/win_rate_low", "human_eval/reward_agreement", "human_eval/fleiss_kappa",
    ],
}  # fmt: skip


def test_a_line_shows_a_stages_few_main_metrics_that_it_recorded_and_no_others() -> None:
    assert {s: brief_metrics(s, [m.name for m in metrics]) for s, metrics in MAIN_METRICS.items()} == BRIEF
    assert brief_metrics("ppo", ["ppo/violations", "ppo/entropy", "ppo/kl"]) == ["ppo/kl", "ppo/violations"]
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
        "reward/test_pairs", "data/overlong", "data/label_noise", "ppo/proxy_reward", "human_eval/win_rate_low",
        "human_eval/always_valid_low", "human_eval/always_valid_low_of_people", "human_eval/raters",
        "human_eval/reward_auroc",
    }  # fmt: skip


def test_words_and_unit_make_a_metrics_text() -> None:
    assert MainMetric("x/kl", "KL to the SFT model", "nats a token").text == "KL to the SFT model, nats a token"
    assert MainMetric("x/kl", "KL to the SFT model").text == "KL to the SFT model"


def test_a_gates_name_gives_its_stage_its_key_and_where_none_is_named_its_metric() -> None:
    gate = Gate("ppo.kl.per_token", "<=", "")
    assert (gate.stage, gate.short, gate.metric) == ("ppo", "kl.per_token", "ppo/kl.per_token")
    assert Gate("ppo.kl", "<=", "", "ppo/kl_high").metric == "ppo/kl_high"


def test_only_these_gates_warn_take_a_stand_in_or_are_off_where_nothing_was_measured() -> None:
    assert [g.name for g in GATES.values() if g.warn_only] == [
        "ppo.kl_floor", "ppo.beta_drift_below_target", "ppo.proxy_rise_at_level_kl", "ppo.ratio_max",
        "ppo.clip_fraction_max",
    ]  # fmt: skip
    assert [g.name for g in GATES.values() if g.ends] == ["ppo.length_ratio"]
    assert [g.name for g in GATES.values() if g.if_measured] == [
        "validate.judge_contract", "validate.judge_pairs", "reward.judge_accuracy_low", "reward.judge_ece",
        "reward.judge_calibration_slope", "reward.judge_length_gain_low",
        "reward.refresh_gain_low", "reward.suite_accuracy_low", "ppo.stopped", "ppo.beta_drift_below_target",
        "ppo.proxy_rise_at_level_kl", "ppo.replaced_max", "ppo.rule_violations_excess", "ppo.judge_gain_low",
        "human_eval.raters_alike", "human_eval.attention_low",
    ]  # fmt: skip
    assert {g.name: g.or_within for g in GATES.values() if g.or_within} == {
        "reward.ece": "reward/ece_null_95", "reward.ece_width": "reward/ece_width_null_95",
        "reward.calibration_slope": ("reward/slope_null_low", "reward/slope_null_high"),
        "reward.judge_ece": "reward/judge_ece_null_95",
        "reward.judge_calibration_slope": ("reward/judge_slope_null_low", "reward/judge_slope_null_high"),
        "human_eval.reward_ece": "human_eval/reward_ece_null_95",
    }  # fmt: skip


def test_only_these_gates_judge_neither_an_end_of_an_interval_nor_what_chance_reaches() -> None:
    """Counts, exact checks, and numbers of a whole run whose interval or null is in the metric itself."""
    assert [
        g.name
        for g in GATES.values()
        if not (g.metric.endswith(("_low", "_high")) or g.ends or g.or_within or g.warn_only)
    ] == [
        "validate.contract", "validate.judge_contract", "validate.judge_pairs", "validate.pairs",
        "validate.leaked_prompts", "reward.temperature_at_end", "reward.invariance", "reward.slice_ece_excess",
        "reward.probe_texts", "reward.position_invariance", "ppo.stopped", "ppo.replaced_max", "ppo.score_spread_min",
        "ppo.evaluated", "human_eval.labels_complete", "human_eval.items", "human_eval.raters_alike",
    ]  # fmt: skip
