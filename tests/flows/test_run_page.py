"""The report's page: the stored numbers are on it, what models and data wrote is text, and it can load nothing."""

import base64
import hashlib
import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flows import launch as launching
from flows import run_page
from flows.charts import Chart
from flows.config import load_config
from flows.run_facts import run_facts
from flows.run_page import breakable, cut, duration, moment, page, shown, write_page
from tests.stored_run import HOSTILE, forget, stored_run

HEAVY = {"torch", "transformers", "matplotlib", "mlflow", "prefect", "great_expectations"}


class Text(HTMLParser):
    """The words of a page, and the tags it has."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

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
        "Profile tiny, project tether, seed 0; begun 20", "PASS ppo. kl 2.789 ≤ 5", "rows quarantined 2",
        "preferences: unique PASS 2 are kept out The row repeats no other. 17, 230", "loss, nats per token 0.4321",
        "0.8123 (0.7712 to 0.8467), on 200 pairs", "100 0.85 0.8334 0.7512 0.8923", "2.345, upper end 2.789",
        "Prompt 4 the worst KL user: asked 4", "score 0.04 · KL 9.75 nats · 4 tokens", "Prompt 8 the highest reward",
        "Win rate against SFT 0.6543, 95 % interval 0.5987 to 0.7056, n = 48 items, judged by people.",
        "1 of ", "ppo. updates 7 changed 3", "0.1.0, commit c0ffeec0ffee", "torch 2.13.0",
    ):  # fmt: skip
        assert words in text, words


def test_curves_stand_as_numbers_below_their_pictures(tmp_path: Path) -> None:
    stored_run(tmp_path)
    text = shown_text(tmp_path)
    assert "optimiser step training loss 1 5.5 2 2.25 3 0.75" in text
    columns = "PPO update proxy reward KL to SFT on held-out prompts, at the end, to its upper end"
    assert f"{columns} 1 0.125 0 2 0.75 1.44 3 1.25 2.25 2.345" in text
    assert "√KL, √nats proxy reward on held-out prompts, at the end 0 0.125 1.2 0.75 1.5 1.25 1.531 1.357" in text


def levels(chart: Chart | None) -> list[str]:
    assert chart is not None
    return [name for _, name in chart.legend][2:]


def test_kl_stands_beside_what_holds_it_and_what_judges_it(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["ppo.kl.control=adaptive", "ppo.updates=90", "ppo.kl.stop_above=9"])
    ppo = run_facts(tmp_path)["ppo"]
    course = run_page.ppo_charts(ppo)["course"]
    assert levels(course) == [
        "on held-out prompts, at the end, to its upper end", "target 6 ± 20 %: β moves with the error",
        "hard ceiling 9", "bound of the gate ppo.kl, 5",
    ]  # fmt: skip
    # The panel goes from 0 to 9 and 5 %: the band is 4.8 to 7.2, the interval 2.345 to 2.789, of 190 units.
    unit = 190 / (9 * 1.05)
    band = re.search('class="band" .*? height="([0-9.]+)"', course.svg)  # type: ignore[union-attr]
    bar = re.search('class="bar d" d="M[0-9.]+,([0-9.]+)V([0-9.]+)"', course.svg)  # type: ignore[union-attr]
    assert band is not None and float(band[1]) == pytest.approx(2.4 * unit, abs=0.11)
    assert bar is not None and float(bar[1]) - float(bar[2]) == pytest.approx(0.444 * unit, abs=0.11)


def test_a_tether_in_nats_a_token_is_drawn_in_them_without_the_gates_bound_of_a_response(tmp_path: Path) -> None:
    stored_run(tmp_path)
    ppo = run_facts(tmp_path)["ppo"]
    ppo["kl"] |= {"unit": "token", "control": "adaptive", "target": 0.05}
    ppo["curves"] |= {"ppo/kl_per_token": [(1, 0.0), (2, 0.04)]}
    ppo["metrics"] |= {"ppo/kl_per_token": 0.03}
    course = run_page.ppo_charts(ppo)["course"]
    assert levels(course) == ["on held-out prompts, at the end", "target 0.05 ± 20 %: β moves with the error"]
    assert course is not None and [row[2:] for row in course.rows] == [[0.0, None], [0.04, 0.03], [None, None]]


def test_a_stopped_a_cached_and_a_waived_run_say_so(tmp_path: Path) -> None:
    first = stored_run(tmp_path / "a")
    stored_run(tmp_path / "a", "20260102-000000-bbbb", by=first)
    cached = shown_text(tmp_path / "a", "20260102-000000-bbbb")
    assert f"computed by {first} in 12 s" in cached and f"The policy was computed by run {first}" in cached
    stored_run(tmp_path / "b", changes=["gates.ppo.kl=2.5"])
    stopped = shown_text(tmp_path / "b")
    assert "Stopped by ppo.kl: ppo/kl_high is 2.789, must be ≤ 2.5." in stopped
    assert "There is no result: not run." in stopped
    stored_run(tmp_path / "c", changes=["gates.ppo.kl=2.5"], waive={"ppo.kl": f"because {HOSTILE}"})
    assert f"ppo.kl was waived by ada: “because {HOSTILE}”" in shown_text(tmp_path / "c")


def test_what_is_lost_is_said_and_the_rest_is_there(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    for stage, name in (("sft", "points.jsonl"), ("ppo", "evaluation.jsonl"), ("reward", "calibration.json")):
        forget(tmp_path, run, stage, name)
    (tmp_path / "runs" / run / "metrics" / "sft.jsonl").unlink()
    text = shown_text(tmp_path)
    assert "Training loss: neither the store nor a run here has its points." in text
    assert "the artifact that holds them is not in the store any more" in text
    assert "Reliability after temperature: the store holds no calibration" in text
    assert "2.345, upper end 2.789" in text


def test_what_models_and_data_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["gates.ppo.kl=2.5", f"project={'p' * 20}"], waive={"ppo.kl": HOSTILE})
    source = page(run_facts(tmp_path))
    found = Text(source)
    # The waiver, a response, and two quarantined rows with a reason each.
    assert found.text.count(HOSTILE) == 6
    assert not found.tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
    assert not {name for name in found.attributes if name.startswith("on") or name in ("src", "style", "srcset")}
    assert set(re.findall(r'href="([^#"][^"]*)"', source)) == set(), "links within the page alone"


def test_the_content_policy_lets_in_the_pages_own_style_sheet_and_nothing_else(tmp_path: Path) -> None:
    stored_run(tmp_path, upto="validate")
    source = page(run_facts(tmp_path))
    style = re.search("<style>(.*?)</style>", source, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = html.unescape(re.search('Content-Security-Policy" content="(.*?)"', source)[1])  # type: ignore[index]
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style[1] and "@import" not in style[1]


def test_a_row_that_utf8_cannot_hold_does_not_lose_the_page(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="validate")
    assert b"half \\ud83d" in write_page(tmp_path, run).read_bytes()


def test_the_page_is_small_and_needs_no_framework(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    code = (
        "import sys; from pathlib import Path; from flows import launch; from flows.run_page import write_page;"
        f"write_page(Path({str(tmp_path)!r}), {run!r}); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & HEAVY
    assert (tmp_path / "runs" / run / "report.html").stat().st_size < 200_000


def ended(home: Path) -> launching.Launch:
    launch = launching.new_run(home, "tiny", load_config("tiny").resolved())
    with launch.ctx:
        pass
    return launch


def test_every_run_leaves_both_reports_when_it_ends(tmp_path: Path) -> None:
    folder = ended(tmp_path).ctx.folder
    assert (folder / "report.md").read_text().startswith(f"# Run {folder.name}: not_run")
    assert f"Run {folder.name}" in (folder / "report.html").read_text()


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
    assert "could not be written (KeyError('nonsense'))" in said and f"tether report {launch.ctx.run}" in said
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
