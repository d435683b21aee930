"""Records of runs, judged again: what the monitors saw comes back whole; alarms, gains and gold are read from it."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from components.ppo.monitors.alarms import Limits
from components.ppo.monitors.measures import Batch
from tests.bench.alarm_rates import as_batch, as_row, told

KNOWN = [1, 2, 3]


def batch(seed: int, size: int = 64, **changed: Any) -> Batch:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice([f"w{i}" for i in range(30)], 9)) for _ in range(size)]
    numbers = (rng.gamma(9, 1 / 9, size) for _ in range(5))
    return replace(Batch([f"p{i}" for i in range(size)], texts, [[1, 2, 3]] * size, [0] * size, *numbers), **changed)


def test_a_batch_comes_back_from_json_as_it_was() -> None:
    before = batch(0)
    after = as_batch(json.loads(json.dumps(as_row(before))))
    for name in ("token_ids", "special", "lengths", "scores", "nll", "entropies", "kl"):
        np.testing.assert_allclose(np.array(getattr(before, name)), np.array(getattr(after, name)), atol=1e-6)
    assert (after.prompts, after.texts) == (before.prompts, before.texts)


def test_a_record_is_judged_as_the_run_was(tmp_path: Path) -> None:
    sft, roles = batch(0, 128), batch(2, special=[1] * 64)
    path = tmp_path / "cut-3.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for update, each, gold, proxy in ((0, sft, 0.0, 0.0), (1, batch(1), 0.1, 0.4), (2, roles, -1.0, 1.2)):
            golds = [gold - 0.1, gold + 0.1] * 32
            row = {"update": update, "gold": golds, "rate": 0.01, "updates": 60, "beta": 0.1, "ppo/proxy_reward": proxy}
            row |= {"known": KNOWN}
            file.write(json.dumps(row | as_row(each)) + "\n")
    first, text = told(path)
    limits = Limits.of(sft, 0.01, 60, KNOWN)
    assert first == {alarm.name: 2 for alarm in limits.judge(roles, 0.1)[1]} and "special_token" in first
    assert text.startswith("cut-3: 2 updates, proxy reward reached 1 at 2, gold certainly below SFT's at 2;")
