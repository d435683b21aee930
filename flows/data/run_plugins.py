"""Resolve the plug-ins that a run names for its gates and data files, when the run begins."""

from components.gates.judging import ExtraGate
from components.keys.plugins import find_plugin, plugin_code
from flows.config.run_config import RunConfig


def settled_readers(config: RunConfig) -> RunConfig:
    """Return `config` with the code digest of each plug-in in `data.readers`. Raises UserError if one is not
    installed."""
    readers = {}
    for suffix, reader in config.data.readers.items():
        plugin = find_plugin("tether.readers", reader.plugin, f"data.readers.{suffix}")
        readers[suffix] = reader.model_copy(update={"code": plugin_code(plugin)})
    data = config.data.model_copy(update={"readers": readers})
    return config.model_copy(update={"data": data}) if readers else config


def settled_gates(config: RunConfig) -> RunConfig:
    """Return `config` with the code digest of each plug-in in `gates.extra`. Raises UserError if one is not
    installed."""

    def settled(field: str, gate: ExtraGate | None) -> ExtraGate | None:
        if gate is None or not gate.plugin:
            return gate
        plugin = find_plugin("tether.gates", gate.plugin, field)
        return gate.model_copy(update={"code": plugin_code(plugin)})

    extra = {
        stage: {short: settled(f"gates.extra.{stage}.{short}", gate) for short, gate in gates.items()}
        for stage, gates in config.gates.extra.items()
    }
    return config.model_copy(update={"gates": config.gates.model_copy(update={"extra": extra})}) if extra else config
