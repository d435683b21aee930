"""Plug-ins of an installed distribution: the example package, installed by pip into a folder of its own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.data.config import ReaderPlugin
from components.data.readers import read_source
from components.gates.judging import GatesConfig, failure, judge
from components.gates.plugged import plugged_metrics
from components.keys.plugins import _IMPORTED, find_plugin, installed_plugins, plugin_code
from components.rewards.config import PluginReward
from components.rewards.function import FunctionSource
from components.rewards.source import Replies
from flows.config.run_config import check_config, load_config, to_values
from flows.data.reward_sources import settled_rewards
from flows.data.run_plugins import settled_gates, settled_readers
from flows.doctor import _plugins
from tasks.execution.keying import key_of
from tasks.stages import STAGES
from tests.waiting import until

PACKAGE = Path(__file__).with_name("plugin_package")
TWO = Replies([[{"role": "user", "content": "how many?"}]] * 2, ["one", "three"], [{}, {}])


def install(package: Path, target: Path) -> None:
    """By pip, without network, isolation or dependencies."""
    command = "pip install -q --no-deps --no-build-isolation --no-index --disable-pip-version-check --target".split()
    subprocess.run([sys.executable, "-m", *command, str(target), str(package)], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("package") / "copy"  # a build writes beside its sources
    shutil.copytree(PACKAGE, copy)
    install(copy, copy.parent / "site")
    return copy.parent / "site"


@pytest.fixture
def site(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the installation, importable here and in processes that start here."""
    copy = tmp_path / "site"
    shutil.copytree(built, copy)
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    yield copy
    forget()


def forget() -> None:
    """Import the package anew, as another process would."""
    _IMPORTED.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tether_example"]:
        del sys.modules[name]


def config(changes: dict[str, Any]) -> Any:
    values: Any = to_values(load_config("tiny"))
    for key, value in changes.items():
        group, _, name = key.partition(".")
        values[group][name] = value
    return check_config(values, "test")


def key(stage: str, found: Any) -> str:
    return key_of(STAGES[stage], found.stage_job(STAGES[stage]), {})[0]


def test_the_example_offers_one_plug_in_of_each_kind_and_doctor_lists_them(site: Path) -> None:
    assert [(f.level, f.text) for f in _plugins()] == [
        ("ok", "rewards: short (tether-example 1.0)"),
        ("ok", "gates: no_apologies (tether-example 1.0)"),
        ("ok", "readers: chat_log (tether-example 1.0)"),
        ("ok", "observers: brevity (tether-example 1.0), words (tether-example 1.0)"),
    ]


def test_without_it_each_option_that_names_a_plug_in_is_refused() -> None:
    gate = {"ppo": {"sorry": {"plugin": "no_apologies", "op": "<=", "threshold": 0.1}}}
    with pytest.raises(UserError, match=r"ppo.rewards: there is no plug-in short of the group tether.rewards; none is"):
        settled_rewards(config({"ppo.rewards": [{"source": "plugin:short"}]}), Path())
    with pytest.raises(UserError, match=r"ppo.observers: there is no plug-in words of the group tether.observers"):
        settled_rewards(config({"ppo.observers": ["words"]}), Path())
    with pytest.raises(UserError, match=r"gates.extra.ppo.sorry: there is no plug-in no_apologies"):
        settled_gates(config({"gates.extra": gate}))
    with pytest.raises(UserError, match=r"data.readers.\.chat: there is no plug-in chat_log"):
        settled_readers(config({"data.readers": {".chat": "chat_log"}}))
    assert _plugins() == []


def test_a_plugged_reward_scores_in_a_process_of_its_own(site: Path) -> None:
    source = FunctionSource(PluginReward(source="plugin:short"))
    try:
        assert source.score(TWO) == [-3.0, -5.0]
    finally:
        source.close()


def test_the_files_of_the_distribution_are_in_the_key_and_its_metadata_and_bytecode_are_not(site: Path) -> None:
    changes = {"ppo.rewards": [{"source": "plugin:short"}], "ppo.observers": ["words"]}
    asked = config(changes | {"data.readers": {".chat": "chat_log"}})

    def settled() -> Any:
        return settled_readers(settled_rewards(asked, site)[0])

    before = settled()
    assert before.ppo.rewards[0].code.startswith("tether-example 1.0 ")
    assert before.ppo.observers[0].code == before.ppo.rewards[0].code
    (site / "tether_example" / "__pycache__").mkdir(exist_ok=True)
    (site / "tether_example" / "__pycache__" / "gates.cpython-311.pyc").write_bytes(b"other")
    next(site.glob("*.dist-info")).joinpath("INSTALLER").write_text("another")
    assert settled() == before
    (site / "tether_example" / "gates.py").write_text("x = 1\n")  # any of its files: they may import each other
    after = settled()
    assert key("ppo", after) != key("ppo", before) and key("validate", after) != key("validate", before)
    assert key("sft", after) == key("sft", before)


def test_a_plug_in_that_changed_after_the_run_began_is_refused(site: Path, tmp_path: Path) -> None:
    code = plugin_code(find_plugin("tether.rewards", "short", "test"))
    (site / "tether_example" / "rewards.py").write_text("def short(p, r, rows):\n    return [1.0] * len(r)\n")
    with pytest.raises(UserError, match=r"ppo.rewards: the plug-in short was tether-example 1.0 .* when the run began"):
        FunctionSource(PluginReward(source="plugin:short", code=code))
    (tmp_path / "a.chat").write_text("a | b | c\n")
    with pytest.raises(UserError, match=r"data.readers.\.chat: the plug-in chat_log was"):
        list(read_source(tmp_path / "a.chat", readers={".chat": ReaderPlugin(plugin="chat_log", code=code)}))


def test_a_plugged_reader_reads_its_suffix_and_its_mistake_names_file_and_row(site: Path, tmp_path: Path) -> None:
    readers = config({"data.readers": {".chat": "chat_log"}}).data.readers
    path = tmp_path / "a.chat"
    path.write_text("Where is it? | On its way. | Who knows.\nAnd now? | Here. | No.\n")
    assert [(row.number, row.data["chosen"]) for row in read_source(path, readers=readers)] == [
        (1, "On its way."),
        (2, "Here."),
    ]
    path.write_text("a | b | c\nno bars\n")
    with pytest.raises(UserError, match=r"a.chat: the plug-in chat_log \(tether-example 1.0\) .* after row 1"):
        list(read_source(path, readers=readers))
    with pytest.raises(UserError, match=r"name a plug-in that reads it in data\.readers"):
        list(read_source(path))


def gates(**of_ppo: Any) -> GatesConfig:
    return GatesConfig.model_validate({"extra": {"ppo": of_ppo}})


SORRY = {"plugin": "no_apologies", "op": "<=", "threshold": 0.1}


def test_a_plugged_gate_measures_the_artifact_and_stops_the_run(site: Path, tmp_path: Path) -> None:
    said = ["Sorry, no.", "It ships today.", "I am sorry.", "Yes."]
    lines = [json.dumps({"policy": {"response": text}}) for text in said]
    (tmp_path / "evaluation.jsonl").write_text("\n".join(lines))
    found = plugged_metrics("ppo", {}, tmp_path, gates(sorry=SORRY))
    assert found == {"ppo/plugin/sorry": 0.5}
    (verdict,) = [v for v in judge("ppo", found, gates(sorry=SORRY)) if v.name == "ppo.sorry"]
    assert (verdict.value, verdict.passed, verdict.stops) == (0.5, False, True)
    error = failure("ppo", [verdict])
    assert error is not None and error.exit_code == 3
    off = gates(sorry=SORRY | {"threshold": None})
    assert plugged_metrics("ppo", {}, tmp_path / "absent", off) == {}, "one that is off is not asked"


def test_a_plugged_gate_that_raises_is_the_users_mistake_and_never_passes(site: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gates.extra.ppo.sorry: the plug-in no_apologies .* raises FileNotFoundError"):
        plugged_metrics("ppo", {}, tmp_path, gates(sorry=SORRY))
    for body, message in (
        ("return 'few'", "it returned 'few'"),
        ("import os; os._exit(7)", r"no_apologies .* its process ended \(exit code 7\)"),
        ("print('hello'); return metrics['ppo/kl']", "raises KeyError"),
    ):
        (site / "tether_example" / "gates.py").write_text(f"def apologies(metrics, artifact):\n    {body}\n")
        with pytest.raises(UserError, match=message):
            plugged_metrics("ppo", {}, tmp_path, gates(sorry=SORRY))
    assert plugged_metrics("ppo", {"ppo/kl": 2.5}, tmp_path, gates(sorry=SORRY)) == {"ppo/plugin/sorry": 2.5}
    (site / "tether_example" / "gates.py").write_text("import no_such_module\n")
    with pytest.raises(UserError, match=r"no_apologies \(tether-example 1.0\): importing .* raises ModuleNotFound"):
        plugged_metrics("ppo", {}, tmp_path, gates(sorry=SORRY))


def test_a_plugged_gate_that_hangs_ends_with_its_name_and_leaves_no_process(site: Path, tmp_path: Path) -> None:
    """Also where it waits outside Python, in a process that it has started."""
    body = "subprocess.Popen(['sleep', '987'])\n    time.sleep(987)"
    text = f"import subprocess, time\ndef apologies(metrics, artifact):\n    {body}\n"
    (site / "tether_example" / "gates.py").write_text(text)
    limit = r"gates.extra.ppo.sorry: the plug-in no_apologies .* time limit of 1 s.*raise gates.extra.ppo.sorry.timeout"
    with pytest.raises(UserError, match=limit):
        plugged_metrics("ppo", {}, tmp_path, gates(sorry=SORRY | {"timeout": 1}))
    gone = ["pgrep", "-fx", "sleep 987"]
    until("no process is left", lambda: subprocess.run(gone, check=False).returncode == 1, 5)


def test_a_gate_judges_a_metric_or_what_a_plug_in_measures_and_not_both() -> None:
    for wrong in ({"op": ">=", "threshold": 1}, {**SORRY, "metric": "ppo/kl"}):
        with pytest.raises(ValueError, match="set either metric"):
            gates(sorry=wrong)


def test_a_name_that_two_distributions_offer_is_refused(site: Path) -> None:
    other = site / "other-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[tether.rewards]\nshort = json:loads\n")
    with pytest.raises(UserError, match=r"both offer a plug-in called short"):
        installed_plugins("tether.rewards")


@pytest.mark.whole
def test_a_run_reads_rewards_and_is_stopped_by_plug_ins(tether: Any, site: Path, tmp_path: Path) -> None:
    """All three in one run: its data in the package's format, its reward, and its gate, which fails."""
    pairs = (f"Where is parcel {n}? | Parcel {n} ships. | Unknown {n}." for n in range(60))
    (tmp_path / "pairs.chat").write_text("\n".join(pairs))
    options = {
        "data.preferences": "pairs.chat", "data.readers": "{.chat: chat_log}", "ppo.evaluate": "8",
        "ppo.rewards": '[{source: "plugin:short"}]',
        "gates.extra": '{ppo: {silence: {plugin: no_apologies, op: ">", threshold: 1}}}',
        "gates.validate.annotator_agreement": "null", "gates.sft.loss": "null", "gates.sft.perplexity_ratio": "null",
    }  # fmt: skip
    sets = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    done = tether("run", "tiny", *sets, home=tmp_path / "home", PYTHONPATH=str(site))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "ppo.silence: ppo/plugin/silence is 0, must be > 1" in done.stderr
    shown = json.loads(tether("status", "--json", home=tmp_path / "home").stdout)
    (gate,) = [each for each in shown["stages"][3]["gates"] if each["name"] == "ppo.silence"]
    assert gate["value"] == 0 and gate["passed"] is False and shown["stages"][4]["state"] == "not_run"


def test_a_plug_in_that_exits_is_the_users_mistake(site: Path, tmp_path: Path) -> None:
    """It ended the whole command with its own exit code, and without a message."""
    module = site / "tether_example" / "readers.py"
    (data := tmp_path / "d.chat").write_text("a\n")
    reader = {".chat": ReaderPlugin(plugin="chat_log")}
    text = module.read_text()
    module.write_text("import sys\nsys.exit(0)\n" + text)
    with pytest.raises(UserError, match=r"chat_log .*can't be imported: SystemExit: 0"):
        list(read_source(data, readers=reader))
    forget()
    module.write_text(text + "\n\ndef read(path):\n    raise SystemExit(0)\n")
    with pytest.raises(UserError, match=r"chat_log .* raises SystemExit: 0, after row 0"):
        list(read_source(data, readers=reader))
