"""A sweep's page in a browser: from disk, at both widths, in both schemes, with eight groups of long names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.studies.level_kl import Trial
from flows.studies.sweep import MEASURES, Cell, CellGroup, Sweep
from flows.studies.sweep_page import write_page
from tests.stored_run import HOSTILE

GATES = ["policy.kl", "policy.kl_beyond_ceiling", "policy.repetition"]
WIDE = "[...document.querySelectorAll('.ranges')].filter(box => box.scrollWidth > box.clientWidth).length"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    groups = []
    for place in range(8):
        measures = {name: 1.23 + place + 0.111 * number for number, name in enumerate(MEASURES)
                    if name != "policy/kl_per_token"}  # fmt: skip
        measures = {f"{name}{end}": value + by for name, value in measures.items()
                    for end, by in (("", 0.0), ("_low", -0.56), ("_high", 0.57))}  # fmt: skip
        measures |= {"seconds": 1234.5, "policy/response_tokens": 123.4}
        cells = [
            Cell(seed, f"20260101-00000{seed}-aaaa", "gate_failed" if seed else "passed", GATES[:2 * seed], measures)
            for seed in range(3)
        ]
        options = ["ppo.advantage=rloo", f"ppo.group_size={2 + place}", f"ppo.kl.target={place + 1}"]
        trials = [Trial(1.0, 2.0, "20260101-000000-aaaa", 30.0)]
        groups.append(CellGroup(options, cells, trials, "KL 2 on calibration prompts, inside the band 1 to 3"))
    reply = {"response": f"{HOSTILE} {'long' * 100}", "score": 0.5, "kl": 1.25, "gold": 0.75}
    samples = [
        {"prompt": [{"role": "user", "content": f"prompt {number} {HOSTILE}"}],
         "responses": {"SFT": reply, **{group.name: reply for group in groups}}}
        for number in range(8)
    ]  # fmt: skip
    sweep = Sweep("demo", ["ppo.kl.target=1,2"], seeds=4, groups=groups, samples=samples, sheet="20260101-000009-aaaa")
    return write_page(tmp_path_factory.mktemp("sweep"), sweep)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_axe_finds_nothing_and_nothing_runs_over(
    sweep_page: Path, width: int, scheme: str,
    open_page: Callable, violations: Callable, overflow: Callable, picture: Callable,
) -> None:  # fmt: skip
    visit = open_page(sweep_page, width=width, scheme=scheme)
    picture(visit.page, f"sweep-{width}-{scheme}")
    assert violations(visit.page) == [] and visit.errors == []
    assert overflow(visit.page) == 0
    assert width < 1280 or visit.page.evaluate(WIDE) == 0, "all columns of all tables are in sight"
    assert visit.page.title().startswith("Sweep demo-")
