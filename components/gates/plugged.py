"""Gates whose number a plug-in measures."""

from collections.abc import Mapping
from pathlib import Path

from components.base.errors import UserError
from components.gates.judging import GatesConfig
from components.keys.plugins import check_plugin, find_plugin


def plugged_metrics(stage: str, metrics: Mapping[str, float], artifact: Path, gates: GatesConfig) -> dict[str, float]:
    """What the plug-ins of a stage's gates measure, by the metric's name.

    Args:
        metrics: the stage's final ones.
        artifact: the stage's artifact, a folder; plug-ins must not write there.

    Raises:
        UserError: a plug-in is not installed, changed since the run began, raises, or returns no number. An infinity
            or NaN is a number, and fails its gate.
    """
    found: dict[str, float] = {}
    for name, gate in gates.plugged(stage).items():
        field = f"gates.extra.{stage}.{name.rpartition('/')[2]}"
        plugin = find_plugin("tether.gates", gate.plugin, field)
        check_plugin(plugin, gate.code, field)
        measure, value = plugin.load(field), None
        try:
            value = measure(dict(metrics), artifact)
            found[name] = float(value)
        except Exception as error:
            gave = f" (it returned {value!r:.80})" if value is not None else ""
            raise UserError(
                f"{field}: the plug-in {gate.plugin} ({plugin.label}) raises {type(error).__name__}: {error}{gave}. "
                "It must return one number. Correct it, or set the gate's threshold to null."
            ) from error
    return found
