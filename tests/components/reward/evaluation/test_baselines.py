import pytest

from components.reward.evaluation.baselines import chosen_shown_first, length_baseline, majority_baseline


def test_length_rule_is_oriented_on_training_pairs_alone() -> None:
    correct, rule = length_baseline([5, 3, -1], [-4, 2, 0])
    assert rule == "longer" and correct.tolist() == [0.0, 1.0, 0.5]
    correct, rule = length_baseline([-5, -3, 100], [-4, 2, 0])
    assert rule == "shorter" and correct.tolist() == [1.0, 0.0, 0.5]


def test_majority_rule_is_at_chance_when_the_shown_order_ignores_the_label() -> None:
    prompts = [f"prompt {i}" for i in range(4000)]
    first = chosen_shown_first([{"prompt": p, "chosen": "yes", "rejected": "no"} for p in prompts])
    assert (first != chosen_shown_first([{"prompt": p, "chosen": "no", "rejected": "yes"} for p in prompts])).all()
    assert majority_baseline(first[:2000], first[2000:]).mean() == pytest.approx(0.5, abs=0.04)
    assert majority_baseline([0, 0, 1], [0, 1, 0]).tolist() == [1.0, 0.0, 1.0]
