"""The report's page: the stored numbers are on it, what models and data wrote is text, and it can load nothing."""

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from components.base.jsonl import write_json, write_rows
from components.gates.judging import Verdict
from components.ppo.monitors.curves import STABILISERS
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from flows.launch.begin import Launch, new_run
from flows.reports import page as run_page
from flows.reports.page import breakable, cut, duration, ending, moment, page, shown, write_page
from flows.reports.run_facts import run_facts
from tasks.result import Input
from tasks.runs.awaited_labels import LabelProgress, write_progress
from tasks.runs.journal import read_done, write_done
from tasks.runs.status import StageStatus
from tests import stored_run as stored
from tests.stored_run import HOSTILE, METRICS, forget, stored_run

HEAVY = {"torch", "scipy", "transformers", "matplotlib", "mlflow", "prefect", "great_expectations"}


class Text(HTMLParser):
    """The words of a page, and the tags it has."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.sources: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.sources += [value or "" for name, value in attrs if name in ("src", "srcset")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def shown_text(home: Path, run: str | None = None) -> str:
    return Text(page(run_facts(home, run))).text


def test_the_stored_numbers_are_on_the_page(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["ppo.updates=7"])
    text = shown_text(tmp_path)
    for words in (
        "Profile tiny, project tether, seed 0; started 20", "PASS policy. kl 2.789 ≤ 5 44 % below the bound",
        "rows quarantined 2",
        "preferences: unique PASS 2 are quarantined The row repeats no other. 17, 230",
        "demonstrations: desirable PASS 1 stay, those of weight 0 are quarantined Labelled desirable. 5",
        "loss, nats per token 0.4321",
        "0.8123 (0.7712 to 0.8467), on 200 pairs", "100 0.85 0.8334 0.7512 0.8923", "2.345, upper end 2.789",
        "Prompt 4 the worst KL user: asked 4", "score 0.04 · KL 9.75 nats · 4 tokens", "Prompt 8 the highest reward",
        "mean score falls by 1.25 SFT deviations user: asked 2 SFT sft says 2", "KL of 61.5 nats user: asked 3",
        "Win rate against SFT 0.6543, 95 % interval 0.5987 to 0.7056, n = 48 items, judged by people.",
        "1 of ", "ppo. updates 7 changed 3", "0.1.0, commit c0ffeec0ffee", "torch 2.13.0",
        "optimiser step training loss 1 5.5 2 2.25 3 0.75",
        "PPO update proxy reward KL, nats per response β entropy, nats per token response, tokens "
        "1 0.125 0 0.2 0.5 10 2 0.75 1.44 0.19 0.4 11 3 1.25 2.25 0.17 0.3 12.5",
    ):  # fmt: skip
        assert words in text, words


def test_each_of_several_files_of_preferences_is_on_the_page_with_its_path_digest_and_counts(tmp_path: Path) -> None:
    run = stored_run(tmp_path, changes=["data.preferences=[a.jsonl, b.jsonl]", "data.reference=last"])
    folder, store, out = tmp_path / "runs" / run, ArtifactStore(tmp_path), tmp_path / "several"
    done = next(each for each in read_done(folder) if each.group == "validate")
    inputs = {f"preferences/{name}.jsonl": name * 64 for name in "ab"}
    given = [Input(name=name, digest=digest, path=Path("/data", name)) for name, digest in inputs.items()]
    inputs["reference"] = "c" * 64
    counts = {"rows": 71, "quarantined": 4, "pairs": 67, "splits": {"train": 40, "calibration": 12, "test": 15}}
    by_file = {"rows": 3, "row_numbers": [], "rows_by_file": {"a.jsonl": [17], "b.jsonl": [3, 5]}, "value": 0.1}
    check = {"name": "unique", "source": "preferences", "severity": "warn", "threshold": 0.5, "passed": True}
    out.mkdir()
    options = {"rows": 93, "left_out": 22, "weight": 0.5}
    write_json(out / "sources.json", [{"source": "b.jsonl", **counts}, {"source": "a.jsonl", **counts, **options}])
    write_json(out / "report.json", [{**check, **by_file, "description": "It repeats no other."}])
    record = store.publish(done.record.key, out, None, {"stage": "validate", "run": run, "inputs": inputs})
    write_done(folder, done.model_copy(update={"record": record, "inputs": given}))
    status = folder / "run.json"
    status.write_text(status.read_text().replace(done.record.digest, record.digest))
    text = shown_text(tmp_path)
    for words in (
        f"preferences/a.jsonl /data/preferences/a.jsonl {'a' * 64}", "a.jsonl 93 4 67 40 12 15 22 0.5",
        f"preferences/b.jsonl /data/preferences/b.jsonl {'b' * 64}", "b.jsonl 71 4 67 40 12 15 0 1",
        "test left out by max_pairs weight",
        "It repeats no other. a.jsonl: 17; b.jsonl: 3, 5", f"reference last {'c' * 64}",
    ):  # fmt: skip
        assert words in text, words


def test_the_heading_has_the_runs_name_its_tags_and_who_started_it(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    path = tmp_path / "runs" / run / "run.json"
    called = {"name": "night <b>one", "tags": {"seed": "1", "baseline": ""}, "user": "ada"}
    path.write_text(json.dumps(json.loads(path.read_text()) | called))
    heading = write_page(tmp_path, run).read_text().partition("</header>")[0]
    for said in (
        "<h1>night &lt;b&gt;one <span",
        f"Run <code>{run}</code>, started by ada",
        ">seed=1</span>",
        ">baseline</span>",
    ):
        assert said in heading


def test_the_page_says_what_stages_cost_what_reuse_saved_and_who_else_had_one_computed(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="ppo")
    assert "cost:" not in page(run_facts(tmp_path, run))
    path = tmp_path / "runs" / run / "run.json"
    document = json.loads(path.read_text()) | {"currency": "EUR"}
    document["stages"][1] |= {"price": 3.6, "started": 1.0, "reused": {"sft": 1000.0}}
    document["stages"][3] |= {"price": 36.0, "started": 1.0, "computed": {"ppo": 40.0}}
    document["stages"][3]["user"] = "eve"
    path.write_text(json.dumps(document))
    text = page(run_facts(tmp_path, run))
    assert "<p>by eve, took" in text and text.count("<p>by ") == 1, "who had a stage computed, where it is another one"
    assert "cost: 0.40 EUR, saved 1.00 EUR" in text.partition("</header>")[0]
    assert "; cost: saved 1.00 EUR</p>" in text and "; cost: 0.40 EUR</p>" in text


def test_what_stabilisers_did_stands_in_the_table_of_curves_and_beside_the_final_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stored.CURVES, "ppo", {
        "ppo/kl": [0.0, 1.0, 2.0], **{f"ppo/{name}": [0.125, 0.375, 0.5] for name in STABILISERS},
    })  # fmt: skip
    monkeypatch.setitem(stored.METRICS, "ppo", stored.METRICS["ppo"] | {f"ppo/{name}": 0.625 for name in STABILISERS})
    stored_run(tmp_path)
    text = shown_text(tmp_path)
    table = text.partition("PPO update KL, nats per response")[2]
    assert f"2 1 {' '.join(['0.375'] * len(STABILISERS))} 3 2" in table
    assert text.count("mean of all updates 0.625") == len(STABILISERS)


def test_alarms_what_carries_kl_and_the_choice_of_a_checkpoint_are_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = stored._files

    def more(stage: str, out: Path) -> None:
        files(stage, out)
        if stage in ("sft", "ppo"):
            alarm = {"name": "hedge", "update": 2, "meaning": f"Responses hedge. {HOSTILE}", "sft": 0.1}
            about = {"reason": f"Step 8 of {stage} is published.", "alarms": [alarm]}
            write_json(out / "metadata.json", about)
        if stage == "ppo":
            token = {"token": HOSTILE, "nats": 0.625, "count": 17, "share": 0.3125}
            prompt = {"prompt": [{"role": "user", "content": "what carries"}], "response": "said", "nats": 7.5}
            older = {"update": 1, "kl": 0.0, "tokens": [], "prompts": []}
            newest = {"update": 3, "kl": 2.0, "tokens": [token], "prompts": [prompt | {"share": None}]}
            write_rows(out / "kl_carriers.jsonl", [older, newest])

    monkeypatch.setattr(stored, "_files", more)
    stored_run(tmp_path)
    text = shown_text(tmp_path)
    assert "Step 8 of sft is published." in text and "Step 8 of ppo is published." in text
    assert "hedge, update 2 Responses hedge." in text and "What carries KL, update 3" in text
    assert "0.625 0.312 17" in text or "0.625 0.3125 17" in text
    assert "what carries said 7.5" in text


def test_a_long_table_of_numbers_is_thinned_and_says_so(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="sft")
    points = "".join(f'{{"step": {i}, "time": 1, "metrics": {{"ppo/kl": {i}.5}}}}\n' for i in range(1, 302))
    (tmp_path / "runs" / run / "metrics" / "ppo.jsonl").write_text(points)
    text = shown_text(tmp_path)
    assert "1 1.5 4 4.5 7 7.5" in text and "301 301.5" in text and "100 of 301 steps, evenly spaced." in text


def test_the_page_shows_the_stored_charts_and_draws_none(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    source = page(run_facts(tmp_path))
    shown = re.findall('<img src="data:image/svg\\+xml;base64,([^"]*)" alt="((?!Lineage)[^"]*)">', source)
    assert [re.findall("<text>(.*?)<", base64.b64decode(data).decode()) for data, _ in shown] == [
        ["ppo reward_and_kl"], ["ppo frontier"], ["reward reliability"], ["human_eval by_stratum"],
        ["human_eval reward_on_judged"],
    ]  # fmt: skip
    alts = [alt for _, alt in shown]
    assert any("KL, nats per response goes from 0 to 2.25; β goes from 0.2 to 0.17" in alt for alt in alts)
    assert f"tether rerun reward --from {run}" not in source


def test_the_chart_of_a_judge_stands_beside_the_reward_models(tmp_path: Path) -> None:
    run, out = stored_run(tmp_path, upto="reward"), tmp_path / "judge"
    (out / "artifact").mkdir(parents=True)
    (out / "artifact" / "reward.json").write_text("{}")
    (out / "attachments").mkdir()
    drawn = "<svg xmlns='http://www.w3.org/2000/svg'><text>of the judge</text></svg>"
    (out / "attachments" / "judge_reliability.svg").write_text(drawn)
    about = {"stage": "reward.judge", "run": run, "metrics": {}, "job": {}, "inputs": {}, "parts": {}}
    record = ArtifactStore(tmp_path).publish("7" * 64, out / "artifact", out / "attachments", about)
    assert "judge" not in page(run_facts(tmp_path)).partition("Reliability diagram")[2].partition("</figure>")[0]
    path = tmp_path / "runs" / run / "run.json"
    document = json.loads(path.read_text())
    parts = {"reward.judge": {"key": record.key, "digest": record.digest}}
    document["stages"] = [{**each, "parts": parts if each["name"] == "reward" else {}} for each in document["stages"]]
    path.write_text(json.dumps(document))
    shown = re.findall('base64,([^"]*)" alt="Reliability diagram of the judge">', page(run_facts(tmp_path)))
    assert [base64.b64decode(data).decode() for data in shown] == [drawn]


def test_self_checks_stand_on_the_page_with_the_doubtful_ones_in_the_open(tmp_path: Path) -> None:
    held = {"name": "ppo.scale", "verdict": "held", "numbers": "shift 1.5 by both", "compares": "two numbers"}
    doubt = {"name": "ppo.gain", "verdict": "doubtful", "numbers": HOSTILE, "compares": "a gain and KL"}
    assert "Self-checks" not in shown_text(tmp_path, stored_run(tmp_path, upto="validate"))
    write_json(tmp_path / "out" / "attachments" / "self_checks.json", [held, doubt])
    stored_run(tmp_path)
    source = page(run_facts(tmp_path))
    assert HOSTILE not in source and "1 of 2 self-checks held" in source
    assert source.index("ppo.<wbr>gain" if "ppo.<wbr>gain" in source else "ppo.gain") < source.index("self-checks held")
    assert "shift 1.5 by both" in source and "a gain and KL" in source


def test_a_run_of_an_earlier_version_says_how_to_get_its_charts(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="reward")
    forget(tmp_path, run, "reward", "reliability.svg")
    text = shown_text(tmp_path)
    assert (
        "Reliability diagram: confidence against accuracy: no chart is stored. A chart is drawn when the stage is "
        f"computed: tether rerun reward --from {run} draws it." in text
    )
    assert "training loss 1 5.5 2 2.25 3 0.75" in text, "its numbers are there"
    assert "PPO did not run." in text and "drawn when the stage ends" not in text


def test_what_holds_kl_and_what_judges_it_stand_beside_the_chart(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["ppo.kl.control=adaptive", "ppo.updates=90", "ppo.kl.ceiling=9",
                                   "gates.human_eval.win_rate_low=0.5"])  # fmt: skip
    text = shown_text(tmp_path)
    assert "2.345, upper end 2.789; bound of the gate policy.kl 5" in text
    assert "β adaptive, target 3 nats per response; hard ceiling 9 nats per response" in text
    assert "for the lower end: 0.5." in text


def test_kl_held_per_token_is_shown_in_nats_per_token_with_the_gate_that_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_tokens = {"policy/kl_per_token": 0.0456, "policy/kl_per_token_high": 0.0567}
    monkeypatch.setitem(METRICS, "ppo", METRICS["ppo"] | of_tokens)
    stored_run(tmp_path, changes=["ppo.kl.unit=token", "ppo.kl.ceiling=0.2", "gates.policy.kl=null",
                                   "gates.policy.kl_per_token=0.0678"])  # fmt: skip
    text = shown_text(tmp_path)
    judged = (
        "KL to SFT, nats per token 0.0456, upper end 0.0567; bound of the gate policy.kl_per_token 0.0678 KL control β"
    )
    assert judged in text and "hard ceiling 0.2 nats per token KL to SFT, nats per response 2.345" in text
    assert "bound of the gate policy.kl " not in text


def test_results_say_who_won_at_what_length_who_judged_how_and_whether_the_reward_model_can_be_believed(
    tmp_path: Path,
) -> None:
    stored_run(tmp_path, changes=["gates.human_eval.reward_agreement_low=0.5"])
    text = shown_text(tmp_path)
    assert "Of 48 items the policy won 30 (62 %), tied 6 (12 %) and lost 12 (25 %)" in text
    assert "its win rate would be 0.6123 (0.5321 to 0.6987); they are 14 characters longer on average" in text
    header = "rater n win rate a b tie both bad agree with others with themselves a among a and b seconds an item"
    assert f"{header} rater 1 48 0.66 0.44 0.46 0.1 0 0.71 0.9 0.489 (0.35 to 0.63) 21.5 rater 2" in text
    assert "Raters 1, 2 are named for copied answers: 48 of 48 answers are equal." in text
    assert "short 24 0.7 (0.51 to 0.84) long 24 0.6 (0.4 to 0.77)" in text
    assert "that people decided, the reward model prefers what they prefer in 0.6905 (0.5312 to 0.8145)" in text
    assert "-0.5 to 0.75 24 0.5625 (0.37 to 0.74) 0.875 to 4.5 24 0.4375 (0.26 to 0.63) Pairs in four groups" in text
    assert "for a perfect model it is at most 0.1717 in 95 of 100 draws" in text and "0.6543 (0.47 to 0.8)" in text
    assert "unanimous 20 0.8 (0.57 to 0.92) narrow 22 0.591 (0.38 to 0.77)" in text
    assert "human_eval.reward_agreement_low, for the lower end: 0.5." in text
    assert "simulated judges" not in text, "these are people's labels"


def test_what_simulated_judges_decided_is_not_said_of_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "RESULTS", stored.RESULTS | {"judges": "simulated"})
    stored_run(tmp_path)
    text = shown_text(tmp_path)
    assert "that simulated judges decided" in text and "The judges prefer the policy in 0.7143" in text
    assert "that people decided" not in text and "They prefer" not in text


def test_an_earlier_versions_result_shows_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {
        "raters": [{"rater": "rating_1", "n": 48, "win_rate": 0.66, "ties": 0.1, "side_a": 0.5, "agreement": 0.71}],
        "strata": [{"stratum": "short", "n": 48, "win_rate": 0.6543}],
    }  # fmt: skip
    monkeypatch.setattr(stored, "RESULTS", old)
    stored_run(tmp_path)
    text = shown_text(tmp_path)
    assert "rater n win rate tie agree with others with themselves a among a and b rater 1 48 0.66 0.1 0.71" in text
    assert "short 48 0.6543" in text and "still reliable" not in text and "the policy won" not in text


def test_a_stopped_a_cached_and_a_waived_run_say_so(tmp_path: Path) -> None:
    first = stored_run(tmp_path / "a")
    stored_run(tmp_path / "a", "20260102-000000-bbbb", by=first)
    cached = shown_text(tmp_path / "a", "20260102-000000-bbbb")
    assert f"computed by {first} in 12 s" in cached and f"The policy was computed by run {first}" in cached
    stored_run(tmp_path / "b", changes=["gates.policy.kl=2.5"])
    stopped = shown_text(tmp_path / "b")
    assert "Stopped at ppo: the gate policy.kl failed: policy/kl_high is 2.789 and must be ≤ 2.5" in stopped
    assert "There is no result: not run." in stopped
    stored_run(tmp_path / "c", changes=["gates.policy.kl=2.5"], waive={"policy.kl": f"because {HOSTILE}"})
    assert f"policy.kl was waived by ada: “because {HOSTILE}”" in shown_text(tmp_path / "c")


def test_what_is_lost_is_said_and_the_rest_is_there(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    for stage, name in (("sft", "points.jsonl"), ("ppo", "evaluation.jsonl"), ("reward", "calibration.json")):
        forget(tmp_path, run, stage, name)
    (tmp_path / "runs" / run / "metrics" / "sft.jsonl").unlink()
    text = shown_text(tmp_path)
    assert "Numbers: PPO by update" in text
    assert "Numbers: training loss of the supervised" not in text and "Numbers: reliability" not in text
    assert "the artifact that holds them is no longer in the store" in text
    assert "2.345, upper end 2.789" in text


def test_what_models_and_data_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["gates.policy.kl=2.5", f"project={'p' * 20}"], waive={"policy.kl": HOSTILE})
    source = page(run_facts(tmp_path))
    found = Text(source)
    # The waiver, a response among the samples and the worst prompts, and two quarantined rows with a reason each.
    assert found.text.count(HOSTILE) == 7
    assert not found.tags & {"script", "svg", "iframe", "object", "embed", "link", "base", "form"}
    assert not {name for name in found.attributes if name.startswith("on") or name == "style"}
    assert found.sources and all(each.startswith("data:image/svg+xml;base64,") for each in found.sources)
    assert set(re.findall(r'href="([^#"][^"]*)"', source)) == set(), "links within the page alone"


def test_the_content_policy_lets_in_the_pages_own_style_sheet_and_pictures_and_nothing_else(tmp_path: Path) -> None:
    stored_run(tmp_path, upto="validate")
    source = page(run_facts(tmp_path))
    style = re.search("<style>(.*?)</style>", source, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = html.unescape(re.search('Content-Security-Policy" content="(.*?)"', source)[1])  # type: ignore[index]
    assert (
        policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in style[1] and "@import" not in style[1]


def test_a_row_that_utf8_cannot_hold_does_not_lose_the_page(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="validate")
    assert b"half \\ud83d" in write_page(tmp_path, run).read_bytes()


def test_the_page_is_small_and_needs_no_framework(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    code = (
        "import sys; from pathlib import Path; import flows.launch.label_runs; "
        "from flows.reports.page import write_page; "
        f"write_page(Path({str(tmp_path)!r}), {run!r}); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & HEAVY
    assert (tmp_path / "runs" / run / "report.html").stat().st_size < 200_000


def ended(home: Path) -> Launch:
    launch = new_run(home, "tiny", load_config("tiny").resolved())
    with launch.ctx:
        pass
    return launch


def test_a_pages_mistake_does_not_fail_the_run_but_a_full_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> None:
        def write(home: Path, run: str) -> Path:
            raise error

        monkeypatch.setattr(run_page, "write_page", write)

    fail(KeyError("nonsense"))
    launch = ended(tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "could not be written (KeyError('nonsense'))" in said and f"tether status {launch.ctx.run} --html" in said
    fail(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        ended(tmp_path)


def test_texts_are_shortened_and_times_are_readable() -> None:
    assert cut("a" * 1501) == "a" * 1500 + " … (1 more characters)" and cut("short") == "short"
    assert cut({"a": "é"}) == '{"a": "é"}'
    assert [duration(seconds) for seconds in (0.04, 9.96, 59, 61, 3599.6, 7500)] == [
        "0.0 s", "10.0 s", "59 s", "1 min 1 s", "1 h 0 min", "2 h 5 min",
    ]  # fmt: skip
    assert moment("2026-01-02T03:04:05.678+00:00") == "2026-01-02 03:04:05 UTC" and moment("") == ""
    assert [shown(value) for value in ("x", "", None, 0.5, [1, 2])] == ["x", '""', "null", "0.5", "[1, 2]"]
    assert breakable("a.b_<i>") == "a.<wbr>b_<wbr>&lt;i&gt;"


@pytest.fixture
def awaiting(tmp_path: Path) -> str:
    """A run whose raters judge the prompts of the worst KL, the highest reward and the first row."""
    run = stored_run(tmp_path, upto="ppo", changes=["human_eval.judges=people"])
    write_json(tmp_path / "out" / "sheet.json", {"items": 48, "raters": 3})
    asked = [{"item": f"q{n}", "prompt": [{"role": "user", "content": f"asked {n}"}]} for n in (1, 4, 8)]
    write_rows(tmp_path / "out" / "responses.jsonl", asked)
    about = {"stage": "human_eval.sample", "run": run, "job": {}, "inputs": {}, "parts": {}, "metrics": {}}
    record = ArtifactStore(tmp_path).publish("5" * 64, tmp_path / "out", None, about)
    path = tmp_path / "runs" / run / "run.json"
    document = json.loads(path.read_text())
    human = next(each for each in document["stages"] if each["name"] == "human_eval")
    human.update(state="awaiting_labels", key=record.key, digest=record.digest)
    path.write_text(json.dumps(document))
    return run


def test_while_raters_judge_the_page_shows_nothing_of_their_prompts(tmp_path: Path, awaiting: str) -> None:
    """Defect 13: the report, with samples named by author, lay beside the sheet."""
    text = shown_text(tmp_path)
    for number in (1, 4, 8):
        assert f"asked {number}" not in text and f"sft says {number}" not in text
    assert "asked 2" in text and "asked 9" in text and "leave out the prompts that people judge" in text


def test_a_page_that_waits_for_people_says_what_their_labels_can_find_and_does_not_call_them_simulated(
    tmp_path: Path, awaiting: str
) -> None:
    """Defects 5 and 9: nothing said that 48 items find 0.60 in 60 of 100; "judges are simulated" stood there."""
    text = shown_text(tmp_path)
    assert "waits for people's labels: 48 items, 3 raters each. 48 items and 3 raters find a win rate of 0.7" in text
    assert "3 raters are too few to tell how far people differ" in text
    assert "People judge." in text and "judges, gold scores" not in text
    write_progress(tmp_path / "runs" / awaiting, LabelProgress(57, 144, f"https://review.example/{HOSTILE}"))
    text = shown_text(tmp_path)
    assert f"57 of 144 labels (39 %) were in; the review page is at https://review.example/{HOSTILE}" in text
    assert f"tether people status {awaiting} checks again" in text


def test_a_contract_that_failed_names_its_checks_and_their_rows_first(tmp_path: Path) -> None:
    """The sentence said that `data/contract is 0 and must be ≥ 1`, and the check stood far below."""
    named = {"source": "preferences", "severity": "error", "suite": "preferences_rows", "threshold": 0.0}
    filled = {"name": "texts_filled", "description": "No response is empty.", "rows": 2, "first_rows": "17, 230"}
    checks = [
        {**named, **filled, "passed": False, "value": 0.01},
        {**named, **filled, "name": "unique", "severity": "quarantine", "passed": False, "value": 0.01},
        {**named, "name": "every_split", "description": "", "rows": 0, "first_rows": "", "passed": False, "value": 0},
    ]
    verdict = Verdict(name="validate.contract", metric="data/contract", op=">=", value=0, threshold=1, passed=False)
    stage = StageStatus(name="validate", state="gate_failed", gates=[verdict])
    facts = run_facts(tmp_path, stored_run(tmp_path, upto="validate"))
    status = facts.status.model_copy(update={"state": "gate_failed", "stages": [stage]})
    facts = facts._replace(status=status, data=facts.data._replace(checks=checks))
    assert ending(facts) == ["The check texts_filled fails in 2 rows: 17, 230.", "The check every_split fails."]
