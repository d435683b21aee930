"""Gates whose number a plug-in measures, in a separate process with a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from components.base.errors import UserError
from components.gates import plugged_worker
from components.gates.judging import ExtraGate, GatesConfig
from components.keys.plugins import Plugin, check_plugin, find_plugin


def plugged_metrics(stage: str, metrics: Mapping[str, float], artifact: Path, gates: GatesConfig) -> dict[str, float]:
    """Return the numbers that the plug-ins of a stage's gates measure, by the metric's name.

    Args:
        metrics: the stage's final metrics.
        artifact: the folder of the stage's artifact; plug-ins must not write there.

    Raises:
        UserError: a plug-in is not installed, changed since the run began, raises, returns no number, or takes longer
            than its time limit. An infinity or NaN is a number, and fails its gate.
    """
    found: dict[str, float] = {}
    for name, gate in gates.plugged(stage).items():
        field = f"gates.extra.{stage}.{name.rpartition('/')[2]}"
        plugin = find_plugin("tether.gates", gate.plugin, field)
        check_plugin(plugin, gate.code, field)
        found[name] = _measured(plugin, gate, field, json.dumps({"metrics": dict(metrics), "artifact": str(artifact)}))
    return found


def _measured(plugin: Plugin, gate: ExtraGate, field: str, asked: str) -> float:
    """Return the number that a plug-in measures."""
    named = f"{field}: the plug-in {gate.plugin} ({plugin.label})"
    worker = str(Path(plugged_worker.__file__).resolve())
    with subprocess.Popen(
        [sys.executable, worker, plugin.module, plugin.attribute, str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
        start_new_session=True,  # Ctrl-C goes to the run only; the process ends with it
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(asked, timeout=gate.timeout)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{named} takes longer than its time limit of {gate.timeout:g} s, and was ended. Make it faster, or "
                f"raise {field}.timeout, or set the gate's threshold to null."
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes that it has started
    try:
        answer = json.loads(said)
    except ValueError:
        status = process.returncode
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        raise UserError(
            f"{named}: its process ended without an answer ({how}). Look at what it printed above, and correct it."
        ) from None
    if problem := answer.get("unusable"):
        raise UserError(f"{named} {problem}. Correct or reinstall that distribution.")
    if problem := answer.get("raised"):
        raise UserError(
            f"{named} {problem}. It must return one number. Correct it, or set the gate's threshold to null."
        )
    return float(answer["value"])
