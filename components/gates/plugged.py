"""Gates whose number a plug-in measures, in a separate process with a time limit."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from components.gates.judging import GatesConfig
from components.keys.function_process import FunctionProcess
from components.keys.plugins import find_plugin


def plugged_metrics(stage: str, metrics: Mapping[str, float], artifact: Path, gates: GatesConfig) -> dict[str, float]:
    """Return the numbers that the plug-ins of a stage's gates measure, by the metric's name.

    Args:
        metrics: the stage's final metrics.
        artifact: the folder of the stage's artifact; plug-ins must not write there.

    Raises:
        UserError: a plug-in is not installed, changed since the run began, raises, returns no number, or takes longer
            than its time limit. An infinity or NaN is a number, and fails its gate.
    """
    numbers: dict[str, float] = {}
    for name, gate in gates.plugged(stage).items():
        field = f"gates.extra.{stage}.{name.rpartition('/')[2]}"
        plugin = find_plugin("tether.gates", gate.plugin, field, gate.code)
        where = f"{field}: the plug-in {gate.plugin} ({plugin.label})"
        with closing(FunctionProcess(
            where, plugin.root.resolve(), plugin.module, plugin.attribute, gate.timeout,
            installed=True, option=f"{field}.timeout",
        )) as process:  # fmt: skip
            answer = process.call("measuring", {"metrics": metrics, "artifact": str(artifact)})
        if "error" in answer:
            raise process.error(
                f"it raises {answer['error']}. It must return one number. Correct it, or set the gate's threshold to "
                "null."
            )
        numbers[name] = answer["value"]
    return numbers
