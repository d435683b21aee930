"""What the table of an independent judge calls held, and whose numbers it reads."""

from tests.bench.judging import Judged, table

OF_PUBLISHED = {
    "ppo/judge_trained_gain": 0.5, "ppo/judge_trained_gain_low": 0.4, "ppo/judge_trained_gain_high": 0.6,
    "ppo/proxy_reward": 1.2, "ppo/gold": 0.3, "ppo/sft_gold": -0.8, "ppo/kl": 3.0,
}  # fmt: skip
OF_LAST = {
    "ppo/last_judge_gain": -1.0, "ppo/last_judge_gain_low": -1.2, "ppo/last_judge_gain_high": -0.8,
    "ppo/last_proxy_reward": 3.0, "ppo/last_gold": -2.5, "ppo/last_kl": 80.0,
}  # fmt: skip


def test_a_cut_run_is_judged_by_its_last_policy_and_a_tethered_one_by_what_it_has() -> None:
    cut, tethered = Judged.of("cut", OF_PUBLISHED | OF_LAST), Judged.of("tethered", OF_PUBLISHED)
    assert cut == Judged("cut", -1.0, -1.2, -0.8, 3.0, -2.5, -0.8, 80.0) and cut.holds
    assert tethered == Judged("tethered", 0.5, 0.4, 0.6, 1.2, 0.3, -0.8, 3.0) and tethered.holds
    text = table({(0, "cut"): cut, (0, "tethered"): tethered})
    assert "| 0 | cut | -1.00 [-1.20, -0.80] | 3.00 | -2.50 (-0.80) | 80.0 | yes |" in text
    assert "cut: 1 of 1 held" in text


def test_an_interval_that_holds_0_is_held_by_neither() -> None:
    unsure = OF_PUBLISHED | {"ppo/judge_trained_gain_low": -0.1}
    runs = {(0, kind): Judged.of(kind, unsure) for kind in ("cut", "tethered")}
    assert not any(run.holds for run in runs.values()) and "tethered: 0 of 1 held" in table(runs)
