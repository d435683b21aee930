"""A small validate artifact, and models replaced by fakes whose responses say who wrote them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.base.jsonl import write_json, write_rows
from components.data.spreadsheet import write_csv
from components.human_eval import blinded_sample as sample_stage
from components.human_eval.config import HumanEvalConfig, SampleJob, ScoreJob
from components.human_eval.sheet import SheetRow, as_record
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from tests.sheets import read_sheet
from tests.splits import write_split

ITEMS, RATERS = 12, 3


class Case(NamedTuple):
    """A sampled comparison on disk, and what it takes to score it."""

    root: Path
    config: HumanEvalConfig

    @property
    def sample(self) -> Path:
        return self.root / "artifact"

    def rows(self, name: str = "sheet.csv") -> list[SheetRow]:
        return read_sheet(self.sample / name, self.config.raters, self.config.ratings)

    def fill(self, rate: Callable[[SheetRow], tuple[str, ...]], name: str = "filled.csv") -> Path:
        """Hand the sheet to raters: `rate` sees a row and gives its ratings."""
        file = self.root / name
        filled = [row._replace(ratings=rate(row)) for row in self.rows()]
        write_csv(file, list(as_record(filled[0])), map(as_record, filled))
        return file

    def believe(self, score: Callable[[SheetRow, str], float], temperature: float = 1.0) -> None:
        """Have a reward model score the sheet: `score` sees a row and a response."""
        write_json(self.root / "scores" / "scores.json", {"temperature": temperature})
        rows = (
            {"item": row.item.split("-")[0], "a": score(row, row.response_a), "b": score(row, row.response_b)}
            for row in self.rows("sheet.jsonl")
        )
        write_rows(self.root / "scores" / "scores.jsonl", rows)

    def score(self, sheet: Path) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics and `result.json` of a filled sheet."""
        from components.human_eval import unblinded_score

        job = ScoreJob(seed=0, human_eval=self.config)
        inputs = {"sample": self.sample, "sheet": sheet}
        if (self.root / "scores").is_dir():
            inputs["scores"] = self.root / "scores"
        metrics = unblinded_score.run(job, inputs, self.root / "scored", lambda *a, **k: None)
        return metrics, json.loads((self.root / "scored" / "artifact" / "result.json").read_text())


def write_data(folder: Path, task: str = "none", prompts: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.json").write_text(json.dumps({"name": task}))
    rows = [
        {"prompt": [{"role": "user", "content": f"Question {i}" + "?" * (i % 7)}], "category": "xyz"[i % 3]}
        for i in range(prompts)
    ]
    write_split(folder / "prompts.test", rows)
    return folder


def fake_respond(
    job: Any, inputs: Any, prompts: Any, out: Any, observe: Any, **_: Any
) -> dict[str, list[dict[str, Any]]]:
    """Each model's response is what stands in its `voice` file, and the question."""
    voices = {side: (inputs[name] / "voice").read_text() for side, name in (("sft", "sft"), ("policy", "ppo"))}
    return {
        side: [{"text": f"{voice} {p[0]['content']}", "ended": True} for p in prompts] for side, voice in voices.items()
    }


@pytest.fixture
def make_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    """Run the sample stage with fake models that say `sft` and `policy`."""
    monkeypatch.setattr(sample_stage, "respond", fake_respond)

    def make(
        name: str = "case", *, sft: str = "Dear", policy: str = "Hey", seed: int = 0, task: str = "none",
        home: str = "home", **options: Any,
    ) -> Case:  # fmt: skip
        root = tmp_path / name
        for side, voice in (("sft", sft), ("ppo", policy)):
            (root / side).mkdir(parents=True)
            (root / side / "voice").write_text(voice)
        config = HumanEvalConfig(**{"items": ITEMS, "raters": RATERS, "repeats": 0.0} | options)
        job = SampleJob(seed=seed, runtime=Runtime(), generation=GenerationConfig(), human_eval=config)
        inputs = {"data": write_data(root / "data", task), "sft": root / "sft", "ppo": root / "ppo"}
        inputs["seal"] = tmp_path / f"{home}.seal"  # a home's own is drawn, and would give other draws in every test
        inputs["seal"].write_text(home)
        sample_stage.run(job, inputs, root, lambda *a, **k: None)
        return Case(root, config)

    return make
