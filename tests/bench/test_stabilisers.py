"""What the table of stabilisers calls a difference."""

from tests.bench.stabilisers import PLAIN, SHOWN, table


def test_a_variants_difference_is_that_of_paired_seeds_with_its_interval() -> None:
    plain = {seed: dict.fromkeys(SHOWN, float(seed)) for seed in (1, 2, 4)}  # their level is not the variant's
    ptx = {seed: dict.fromkeys(SHOWN, seed - change) for seed, change in ((1, 0.5), (2, 0.4), (4, 0.6))}
    runs = {(s, PLAIN): m for s, m in plain.items()} | {(s, "ptx"): m for s, m in ptx.items()}
    assert "| plain | 3 | 2.333 |" in table(runs)
    assert "| ptx | 3 | 1.833 (-0.500 [-0.748, -0.252]) |" in table(runs)  # 4.303 · 0.1 / sqrt(3) = 0.248
    assert "| ptx | 1 | 0.500 (-0.500) |" in table({key: m for key, m in runs.items() if key[0] == 1})
