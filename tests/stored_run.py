"""The builder of homes for tests: records, toy runs of two stages, whole runs of the profile tiny, in milliseconds."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.hashing import digest_json
from components.base.jsonl import write_json, write_rows
from components.gates.judging import Verdict, Waiver, judge
from components.store.store import ArtifactStore, Record
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config, to_values
from tasks.execution import plots
from tasks.execution.context import Reporting, RunContext
from tasks.runs.journal import Done, write_done
from tasks.runs.points import Spool, points_file
from tasks.runs.status import StatusFile
from tasks.stages import ALWAYS, STAGES

SOURCE = "d" * 64
"""The digest of a file that no stage made."""
HOSTILE = "<script>document.title = 'run'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
METRICS: dict[str, dict[str, float]] = {
    "validate": {
        "data/pairs": 720, "data/quarantined": 2, "data/contract": 1, "data/leaked_prompts": 0,
        "data/annotator_agreement": 0.7321, "data/annotator_agreement_low": 0.7012, "data/pairs_train": 400,
        "data/pairs_calibration": 120, "data/pairs_test": 200,
    },
    "sft": {
        "sft/loss": 0.4321, "sft/perplexity": 1.5405, "sft/perplexity_ratio": 0.0654, "sft/loss_high": 0.4432,
        "sft/perplexity_ratio_high": 0.0765,
    },
    "reward": {
        "reward/accuracy": 0.8123, "reward/accuracy_low": 0.7712, "reward/accuracy_high": 0.8467, "reward/ece": 0.0345,
        "reward/ece_null_95": 0.0456, "reward/test_pairs": 200, "reward/invariance": 0, "reward/position_invariance": 0,
    },
    "ppo": {
        "policy/kl": 2.345, "policy/kl_high": 2.789, "policy/proxy_reward": 1.357, "policy/reward_gain": 1.246,
        "policy/reward_gain_low": 1.134, "ppo/stopped": 0,
        "policy/demonstration_perplexity_ratio": 1.5, "policy/length_ratio": 1.1, "policy/length_ratio_low": 1.0,
        "policy/length_ratio_high": 1.2, "policy/demonstration_perplexity_ratio_high": 1.6,
        "ppo/ratio_max": 1.9, "ppo/clip_fraction_max": 0.2, "ppo/replaced_max": 0.1, "ppo/score_spread_min": 0.8,
    },
    "human_eval": {
        "human_eval/win_rate": 0.6543, "human_eval/win_rate_low": 0.5987, "human_eval/win_rate_high": 0.7056,
        "human_eval/labels_complete": 1, "human_eval/items": 48, "human_eval/reward_agreement_low": 0.5312,
    },
}  # fmt: skip
CURVES: dict[str, dict[str, list[float]]] = {
    "sft": {"sft/train_loss": [5.5, 2.25, 0.75]},
    "ppo": {
        "ppo/proxy_reward": [0.125, 0.75, 1.25], "ppo/kl": [0.0, 1.44, 2.25], "ppo/beta": [0.2, 0.19, 0.17],
        "ppo/entropy": [0.5, 0.4, 0.3], "ppo/response_tokens": [10, 11, 12.5],
    },
}  # fmt: skip
"""By step, from 1."""
BINS = [
    {"confidence": 0.55, "accuracy": 0.5612, "low": 0.4711, "high": 0.6477, "n": 100},
    {"confidence": 0.85, "accuracy": 0.8334, "low": 0.7512, "high": 0.8923, "n": 100},
]
_RATER = {
    "n": 48, "win_rate": 0.66, "a": 0.44, "b": 0.46, "ties": 0.1, "both_bad": 0.0, "agreement": 0.71,
    "self_agreement": 0.9, "side_a": {"value": 0.489, "low": 0.35, "high": 0.63},
}  # fmt: skip
RESULTS: dict[str, Any] = {
    "interval_over": "prompts and raters", "too_few_raters": None, "always_valid_low": 0.512,
    "always_valid_low_of_people": 0.487, "both_bad": 0.03,
    "raters": [_RATER | {"rater": "rating_1", "seconds": 21.5}, _RATER | {"rater": "rating_2", "seconds": None}],
    "named_raters": ["Raters 1, 2 are named for copied answers: 48 of 48 answers are equal."],
    "strata": [
        {"stratum": "short", "n": 24, "win_rate": 0.7, "low": 0.51, "high": 0.84},
        {"stratum": "long", "n": 24, "win_rate": 0.6, "low": 0.4, "high": 0.77},
    ],
    "outcomes": {
        "items": {"wins": 30, "ties": 6, "losses": 12, "wins_share": 0.625, "ties_share": 0.125, "losses_share": 0.25},
        "ratings": {"wins": 84, "ties": 21, "losses": 39, "wins_share": 0.583, "ties_share": 0.146,
                    "losses_share": 0.271},
    },
    "equal_length": {"win_rate": 0.6123, "low": 0.5321, "high": 0.6987, "length_effect": 0.31, "mean_difference": 14.4},
    "reward_model": {
        "pairs": 42,
        "numbers": {
            "agreement": 0.6905, "agreement_low": 0.5312, "agreement_high": 0.8145, "ece": 0.1234,
            "ece_null_95": 0.1717, "calibration_slope": 0.61, "slope_low": 0.22, "slope_high": 1.0,
            "auroc": 0.6543, "auroc_low": 0.47, "auroc_high": 0.8,
        },
        "policy_preferred": {"judges": 0.7143, "reward_model": 0.9524},
        "by_gap": [{"gap": "unanimous", "pairs": 20, "accuracy": 0.8, "low": 0.57, "high": 0.92},
                   {"gap": "narrow", "pairs": 22, "accuracy": 0.591, "low": 0.38, "high": 0.77}],
        "by_gain": [{"gain_from": -0.5, "gain_to": 0.75, "pairs": 24, "win_rate": 0.5625, "low": 0.37, "high": 0.74},
                    {"gain_from": 0.875, "gain_to": 4.5, "pairs": 24, "win_rate": 0.4375, "low": 0.26, "high": 0.63}],
        "bins": BINS,
    },
}  # fmt: skip
"""What `result.json` says beside the win rate."""


def publish(
    home: Path, stage: str, run: str = "r1", *, files: Mapping[str, str] | None = None, key: str | None = None,
    inputs: Mapping[str, str] | None = None, parts: Mapping[str, Any] | None = None, **about: Any,
) -> Record:  # fmt: skip
    """Publish an artifact of a stage.

    Args:
        files: what it holds, by path; else one file that names the stage and the run.
        key: its key; else the digest of its parts.
        inputs: digests of what it was made from, by name.
        parts: what its key is made of beside the stage and the inputs, as `source` and `job`.
        about: further fields of its record.
    """
    out, inputs = home / "out", dict({"data": SOURCE} if inputs is None else inputs)
    shutil.rmtree(out, ignore_errors=True)
    for name, text in ({"value": f"{stage} {run}"} if files is None else files).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    of = {"stage": stage, "job": {}, "inputs": inputs, "source": {}, "libraries": {}, **(parts or {})}
    fields = {"stage": stage, "inputs": inputs, "run": run, "parts": of, **about}
    record = ArtifactStore(home).publish(key or digest_json(of), out, None, fields)
    shutil.rmtree(out, ignore_errors=True)
    return record


def toy_run(
    home: Path, run: str = "r1", text: str = "", state: str = "passed", started: str | None = None,
    config: str = "data: {preferences: null}\nseed: 0\n", ends: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Record]:  # fmt: skip
    """A run of two stages with their records: `ppo` was made from `sft`, which was made from a file that no stage made.

    Args:
        text: what the artifacts hold, so that runs of another text share nothing with this one.
        state: that of `ppo`; a run that is `running` or `interrupted` does not end.
        ends: further fields of the status of a stage.
    """
    status = StatusFile.start(home / "runs" / run, run, "tiny", ["sft", "ppo", "human_eval"])
    (status.folder / "config.yaml").write_text(config)
    (status.folder / "metrics").mkdir()
    (status.folder / "metrics" / "ppo.jsonl").write_text('{"step": 1, "time": 5, "metrics": {"ppo/kl": 0.5}}\n')
    records: dict[str, Record] = {}
    for stage in ("sft", "ppo"):
        files = {"value": f"{stage} {text}", "tokenizer.json": "the same in all"}
        inputs, further = {name: each.digest for name, each in records.items()} or None, (ends or {}).get(stage, {})
        records[stage] = record = publish(
            home, stage, run, files=files, inputs=inputs, parts={"source": {"text": text}},
            metrics=further.get("metrics", {}),
        )  # fmt: skip
        states = {"state": state if stage == "ppo" else "passed", "key": record.key, "digest": record.digest}
        status.update(stage, **(states | dict(further)))
    if state not in ("running", "interrupted"):
        status.finish()
    if started:
        path = status.folder / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"started": started}))
    return records


def evaluation() -> list[dict[str, Any]]:
    """Nine prompts: the fourth has the worst KL, the eighth the highest reward, the first a response that attacks."""
    rows = []
    for number in range(1, 10):
        kl, score = (9.75 if number == 4 else number / 10), (3.25 if number == 8 else number / 100)
        said = HOSTILE if number == 1 else f"policy says {number}"
        about = {"tokens": number, "ended": True}
        prompt = [{"role": "user", "content": f"asked {number}"}]
        rows.append(
            {
                "prompt": prompt,
                "policy": {"response": said, "score": score, "kl": kl, **about},
                "sft": {"response": f"sft says {number}", "score": -score, "kl": 0.0, **about},
            }
        )
    return rows


def _files(stage: str, out: Path) -> None:
    """What a stage's artifact holds, as far as the report reads it."""
    write_json(out / "stage.json", stage)
    if stage == "validate":
        named = {"source": "preferences", "severity": "quarantine", "suite": "preferences_rows", "threshold": 0.05}
        unique = {"name": "unique", "description": "The row repeats no other.", "rows": 2, "row_numbers": [17, 230]}
        filled = {"name": "texts_filled", "description": "No response is empty.", "rows": 0, "row_numbers": []}
        labels = {"name": "desirable", "description": "Labelled desirable.", "rows": 1, "row_numbers": [5]}
        findings = unique, filled, labels | {"source": "demonstrations"}
        checks = [{**named, **each, "passed": True, "value": each["rows"] / 722} for each in findings]
        write_json(out / "report.json", checks)
        row = {"file": "preferences", "reasons": [f"repeats row {HOSTILE}"], "data": {"a": HOSTILE, "b": "half \ud83d"}}
        lines = [json.dumps({**row, "row": number}) + "\n" for number in (17, 230)]
        (out / "quarantine.jsonl").write_text("".join(lines))
    if stage == "reward":
        write_json(out / "calibration.json", {"bins": BINS})
    if stage == "ppo":
        write_rows(out / "evaluation.jsonl", evaluation())
        (_, first, second, *_) = rows = evaluation()
        worst = {"reason": "fall", "value": 1.25, **first}, {"reason": "kl", "value": 61.5, **second}
        write_rows(out / "worst.jsonl", [*worst, {"reason": "kl", "value": 33.0, **rows[0]}])
        steps = [{name: values[i] for name, values in CURVES["ppo"].items()} for i in range(3)]
        write_rows(out / "history.jsonl", [{"update": i, **row} for i, row in enumerate(steps, 1)])
    if stage == "human_eval":
        result = {
            "judges": "people", "target": "share of items", "level": 0.95, "items": 48, "fleiss_kappa": 0.4444,
            "win_rate": {"value": 0.6543, "low": 0.5987, "high": 0.7056}, "ratings": {"given": 144, "asked": 144},
            **RESULTS,
        }  # fmt: skip
        write_json(out / "result.json", result)


def _points(path: Path, stage: str) -> None:
    spool = Spool(path)
    for step in range(3):
        spool.append(step + 1, {name: values[step] for name, values in CURVES.get(stage, {}).items()})
    spool.close()


def stored_run(
    home: Path,
    run: str = "20260101-000000-aaaa",
    *,
    upto: str = "human_eval",
    changes: Sequence[str] = (),
    waive: Mapping[str, str] | None = None,
    by: str | None = None,
    draw: bool = False,
) -> str:
    """A run of the tiny profile in `home`; a gate that fails and isn't waived ends it there.

    Args:
        home: the `TETHER_HOME`.
        run: its id.
        upto: the last stage that ends; the rest are not run.
        changes: to the profile, as `--set` takes them.
        waive: gate to reason.
        by: an earlier stored run whose artifacts are taken, as hits.
        draw: draw the charts (takes seconds) in place of storing a stand-in for each.
    """
    config = load_config("tiny", [parse_override(text) for text in changes]).resolved()
    waivers = [Waiver(gate=gate, user="ada", reason=reason) for gate, reason in (waive or {}).items()]
    gates, values, untracked = config.effective_gates, to_values(config), Reporting(track=False)
    ctx = RunContext.start(home, "tiny", gates, config=values, run=run, waivers=waivers, reporting=untracked)
    with ctx:
        for stage in ALWAYS[: ALWAYS.index(upto) + 1]:
            verdicts = judge(stage, METRICS[stage], gates, waivers)
            if not _end(ctx, stage, config, verdicts, by, draw):
                break
    return run


def _charts(stage: str, config: RunConfig, points: Path, out: Path, draw: bool) -> None:
    """The stage's charts; without `draw`, in place of each a picture of its name."""
    if draw:
        plots.render(stage, config.stage_job(STAGES[stage]), METRICS[stage], points, out)
        return
    for name in plots.CHARTS.get(stage, ()):
        text = f"<svg xmlns='http://www.w3.org/2000/svg'><text>{stage} {name}</text></svg>"
        (out / "attachments").mkdir(parents=True, exist_ok=True)
        (out / "attachments" / f"{name}.svg").write_text(text)


def _end(
    ctx: RunContext, stage: str, config: RunConfig, verdicts: Sequence[Verdict], by: str | None, draw: bool
) -> bool:
    """End a stage with its artifact; False where a gate stops the run."""
    key = f"{stage:x<64}".replace("_", "x")
    record = next(iter(ctx.store.published(key)), None)
    if record is None:
        _points(points_file(ctx.folder, stage), stage)
        out = ctx.home / "out"
        _files(stage, out / "artifact")
        if stage in CURVES:
            _points(out / "attachments" / "points.jsonl", stage)
        _charts(stage, config, points_file(ctx.folder, stage), out, draw)
        job = to_values(config) | {"seed": config.seed}
        about = {
            "stage": stage, "run": ctx.run, "metrics": METRICS[stage],
            "seconds": 12.5, "started": "2026-01-01T00:00:01+00:00",
            "job": {name: job[name] for name in ("seed", "runtime", *([stage] if stage in job else []))},
            "inputs": {"data": "d" * 64}, "parts": {"source": {"a.py": "1"}, "libraries": {"torch": "2.13.0"}},
            "environment": {"python": "3.11.7", "code": {"version": "0.1.0", "commit": "c0ffee" * 6, "dirty": False}},
        }  # fmt: skip
        beside = out / "attachments"
        record = ctx.store.publish(key, out / "artifact", beside if beside.is_dir() else None, about)
    stops = any(verdict.stops for verdict in verdicts)
    waived = any(verdict.waived for verdict in verdicts)
    first = {"outcome": "computed", "because": "first", "reason": "no record", "run": ctx.run}
    why = {"outcome": "hit", "run": by, "pinned": False} if by else first
    ctx.status.update(
        stage, key=key, digest=record.digest, metrics=METRICS[stage], gates=list(verdicts),
        state="gate_failed" if stops else "waived" if waived else "cached" if by else "passed",
        cached=by is not None, seconds=0.5 if by else 12.5, explained={stage: why},
    )  # fmt: skip
    done = Done(
        time=0, record=record, path=ctx.store.path(record), run=ctx.run, user="ada",
        step=0, verdicts=list(verdicts), inputs=[], attachments={},
    )  # fmt: skip
    write_done(ctx.folder, done)
    return not stops


def forget(home: Path, run: str, stage: str, name: str) -> None:
    """Lose an object of the store: a file of what `stage` made, or an attachment."""
    status = json.loads((home / "runs" / run / "run.json").read_text())
    key = next(each["key"] for each in status["stages"] if each["name"] == stage)
    store = ArtifactStore(home)
    record = store.published(key)[0]
    (store.objects / {**record.files, **record.attachments}[name]).unlink()
