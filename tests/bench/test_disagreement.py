"""The bench of ensembles against soup: its halves, and what counts as met."""

from typing import Any

import pytest

from tests.bench.disagreement import half, table


def rows(prompts: int) -> list[dict[str, Any]]:
    """Two or three pairs a prompt, a prompt's apart from each other."""
    return [
        {"prompt": [{"role": "user", "content": f"p{i % prompts}"}], "number": i}
        for i in range(2 * prompts + prompts // 2)
    ]


def test_the_halves_hold_every_row_once_share_no_prompt_and_are_the_same_each_time() -> None:
    given = rows(40)
    first, second = (half(given, 0, which) for which in (0, 1))
    assert sorted(first + second) == list(range(len(given)))
    prompts = [{str(given[i]["prompt"]) for i in part} for part in (first, second)]
    assert not prompts[0] & prompts[1] and len(prompts[0]) == len(prompts[1]) == 20
    assert half(given[::-1], 0, 0) == [len(given) - 1 - i for i in first[::-1]] and half(given, 1, 0) != first


@pytest.mark.parametrize(
    ("auroc", "verdict", "said"),
    [
        (0.8, "(≥ 0.8 met)", "(AUROC 0.80): its disagreement is worth a gate."),
        (0.79, "(≥ 0.8 MISSED)", "(AUROC 0.79): ensembles don't help there."),
    ],
)
def test_a_line_has_the_worst_and_best_member_and_the_verdict(auroc: float, verdict: str, said: str) -> None:
    names = ("auroc", "auroc_shuffled", "auroc_random", "score_auroc")
    found = {"kind": "pipeline", "members": 2, "accuracies": [0.77, 0.75], "sft": 0.3, "shuffled": 0.8, "random": 1.0}
    found |= {f"{name}{end}": 0.5 for name in names for end in ("", "_low", "_high")} | {"auroc": auroc}
    *_, line, _, last = table([found]).splitlines()
    assert last == f"Of these, pipeline with 2 members spots soup best {said}"
    assert line.startswith("| pipeline | 2 | 0.750 to 0.770 | 0.30 | 0.80 | 1.00 |") and verdict in line
