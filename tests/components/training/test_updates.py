"""Updates as values, and observers that a team installs: one that writes a metric, and one that stops a run."""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.keys import plugins
from components.ppo.config import PpoConfig
from components.training.checkpoint import Pace
from components.training.loop import Loop, save_state
from components.training.optim import ObserverPlugin
from components.training.updates import History, Observer, PluggedObserver, Stop, Update

PACKAGE = Path(__file__).parents[1] / "keys" / "plugin_package"
ENTRIES = """[tether.observers]
words = tether_example.observers:Words
brevity = tether_example.observers:Brevity
wrong = wrong:Wrong
"""


def update(number: int = 1, **fields: Any) -> Update:
    return Update(**{"number": number, "total": 3, "model": None, "metrics": {"ppo/kl": 1.0}, "tokens": 4.0} | fields)


def test_an_update_with_more_leaves_the_one_before_as_it_was() -> None:
    first = update()
    more = first.with_metrics({"ppo/a": 2.0}).with_examples([{"prompt": "p"}]).with_timings({"ppo/s": 1.0})
    assert more.metrics == {"ppo/kl": 1.0, "ppo/a": 2.0} and more.examples == [{"prompt": "p"}]
    assert first.metrics == {"ppo/kl": 1.0} and not first.examples and not first.timings


def test_the_reason_to_stop_is_the_first_failures() -> None:
    stopped = update().with_stop("no progress", fails=False).with_stop("KL is too high")
    assert stopped.stop == Stop("KL is too high", fails=True) and stopped.last
    assert not update().last and update(3).last
    assert not update(stops_early=False).with_stop("KL is too high").last, "every stop is off"


def loop(folder: Path, observers: dict[str, Observer[Any]], observe: Callable[..., None]) -> Loop[Update]:
    return Loop(folder, 3, Pace(1, None), observe, observers, {}, {})


def test_a_loop_continues_after_its_last_checkpoint_and_not_after_a_stop(tmp_path: Path) -> None:
    steps: list[int] = []

    def observe(step: int, metrics: Any, **_: Any) -> None:
        steps.append(step)

    first = loop(tmp_path, {"history": History()}, observe)
    with first:
        first.finish(first.run_observers(update(next(iter(first)))))
    history = History()
    again = loop(tmp_path, {"history": history}, observe)
    again.report_resumed(history.rows)
    assert steps == [1, 1, 1] and list(history.rows) == [{"update": 1, "ppo/kl": 1.0}]
    with again:
        again.finish(again.run_observers(update(next(iter(again))).with_stop("KL is too high")))
    ended = loop(tmp_path, {"history": history}, observe)
    assert list(ended) == [] and history.failed and [row["update"] for row in history.rows] == [1, 2]


def test_a_checkpoint_with_other_observers_is_refused_with_its_folder(tmp_path: Path) -> None:
    first = loop(tmp_path, {"history": History()}, lambda *_, **__: None)
    with first:
        first.finish(first.run_observers(update()))
    with pytest.raises(UserError, match=f"the checkpoint in {tmp_path} was written with other options.*Remove that"):
        loop(tmp_path, {}, lambda *_, **__: None)


def test_a_checkpoint_of_an_older_ppo_is_refused_with_its_folder(tmp_path: Path) -> None:
    save_state(tmp_path, 1, {}, {}, {"state": {"number": 1}, "tether": 0.1})
    average = Observer[Update]()
    average.modules = {"average": nn.Linear(1, 1)}
    for observers in ({}, {"average": average}):
        with pytest.raises(UserError, match=f"the checkpoint in {tmp_path} was written .* by another version"):
            loop(tmp_path, observers, lambda *_, **__: None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which the example package, and a module `wrong`, are installed."""
    (about := tmp_path / "site" / "tether_example-1.0.dist-info").mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tether-example\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    (about.parent / "tether_example").symlink_to(PACKAGE / "tether_example")
    monkeypatch.syspath_prepend(str(about.parent))
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tether_example", "wrong")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(plugins, "_IMPORTED", {})
    return about.parent


def test_an_installed_observer_writes_a_metric_and_resumes(
    site: Path, stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    stages.run("ppo", tmp_path / "plain", updates=3)
    plain = read_rows(tmp_path / "plain" / "artifact" / "history.jsonl")
    stages.run("ppo", tmp_path / "whole", updates=3, observers=["words"])
    history = read_rows(tmp_path / "whole" / "artifact" / "history.jsonl")
    means = [row.pop("ppo/words") for row in history]
    assert history[-1].pop("ppo/words_so_far") == pytest.approx(sum(means) / 3) and sum(means) > 0
    assert history[-1] == plain[-1], "it changes nothing else"
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path / "cut", interrupting(3), updates=3, observers=["words"])
    stages.run("ppo", tmp_path / "cut", updates=3, observers=["words"])
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_an_installed_observer_stops_a_run_which_fails(site: Path, stages: Any, tmp_path: Path, caplog: Any) -> None:
    options = {"updates": 6, "learning_rate": 3e-2, "observers": ["brevity"], "stop_epochs_above": None}
    metrics = stages.run("ppo", tmp_path / "on", **options)
    kl = [row["ppo/kl"] for row in read_rows(tmp_path / "on" / "artifact" / "history.jsonl")]
    assert 1 < len(kl) == metrics["ppo/updates"] < 6 and kl[-1] > 0.1 and max(kl[:-1]) <= 0.1
    assert metrics["ppo/stopped"] == 1 and f"update {len(kl)}: KL is above 0.1" in caplog.text
    off = stages.run("ppo", tmp_path / "off", **options, stop_early=False)
    assert off["ppo/updates"] == 6 and off["ppo/stopped"] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "on_update returned None, which is not an update"),
        ("return update.with_metrics({'ppo/x': float('nan')})", "the metric ppo/x is nan. Make it a finite number"),
        ("return update.with_metrics({'ppo/x': 10**400})", "Make it a finite number"),
        ("return update.with_metrics({'ppo/x': True})", "the metric ppo/x is True. Make it a finite number"),
        ("return update.with_metrics({'x y': 1.0})", "the metric 'x y' must be called GROUP/NAME"),
        ("return update.with_examples([{'prompt': object()}])", "raises TypeError: Object of type object"),
        ("raise SystemExit(3)", "raises SystemExit: 3. Correct it"),
    ],
)
def test_a_mistake_of_an_observer_names_the_plug_in(site: Path, body: str, message: str) -> None:
    (site / "wrong.py").write_text(f"class Wrong:\n    def on_update(self, update):\n        {body}\n")
    observer = PluggedObserver[Update](ObserverPlugin(plugin="wrong"), "ppo.observers")
    with pytest.raises(UserError) as error:
        observer.on_update(update())
    assert "ppo.observers: the plug-in wrong (tether-example 1.0)" in str(error.value) and message in str(error.value)


def test_an_observer_can_not_change_a_metric_that_is_there(site: Path) -> None:
    body = "return update.with_metrics({'ppo/kl': 0.0, 'ppo/x': 2})"
    (site / "wrong.py").write_text(f"class Wrong:\n    def on_update(self, update):\n        {body}\n")
    observer = PluggedObserver[Update](ObserverPlugin(plugin="wrong"), "ppo.observers")
    assert observer.on_update(update()).metrics == {"ppo/kl": 1.0, "ppo/x": 2}


def test_an_observer_is_named_once() -> None:
    with pytest.raises(ValidationError, match="observers: a name appears twice"):
        PpoConfig(observers=("words", "words"))  # type: ignore[arg-type]
