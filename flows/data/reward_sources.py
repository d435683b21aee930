"""Resolve the rewards, rules and observers of PPO when a run begins: all outside code that PPO's key depends on."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.paths import user_path
from components.keys.plugins import find_plugin, plugin_code
from components.models.weights import check_weights
from components.rewards.code import code_digest, root_of
from components.rewards.config import FunctionReward, HttpReward, ModelReward, PluginReward, RulesConfig, check_pattern
from components.rewards.http import NO_VERSION, HttpSource
from flows.config import yaml as yaml_text
from flows.config.run_config import RunConfig
from flows.data.hub_models import hub_model, is_hub_name


def settled_rewards(config: RunConfig, home: Path) -> tuple[RunConfig, list[str]]:
    """Return `config` with the code, version or commit of each source, rule and observer, and lines for the user.

    Each call looks them up again and ignores what an earlier run found.

    Raises:
        UserError: a function, a plug-in or a model is missing.
        Unreachable: a scorer does not answer.
    """
    changes: dict[str, Any] = {}
    if config.ppo.rules is not None:
        changes["rules"] = _settled_rules(config.ppo.rules)
    if config.ppo.observers:
        changes["observers"] = tuple(
            observer.model_copy(
                update={"code": plugin_code(find_plugin("tether.observers", observer.plugin, "ppo.observers"))}
            )
            for observer in config.ppo.observers
        )
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update=changes)}) if changes else config
    if config.ppo.rewards is None:
        return config, []
    settled, notes = [], list[str]()
    for reward in config.ppo.rewards:
        fixed: dict[str, Any] = {}
        if isinstance(reward, FunctionReward):
            fixed = {"root": str(root_of(reward)), "code": code_digest(reward)}
        elif isinstance(reward, PluginReward):
            fixed = {"code": plugin_code(find_plugin("tether.rewards", reward.entry, "ppo.rewards"))}
        elif isinstance(reward, HttpReward) and reward.version == "auto":
            with closing(HttpSource(reward)) as scorer:
                fixed = {"told": scorer.version()}
            if fixed["told"] == NO_VERSION:
                notes.append(
                    f"ppo.rewards: {reward.url} reports no version, so ppo is recomputed even if a result is stored"
                )
        elif (column := getattr(reward, "column", None)) and column not in config.data.reward_columns:
            raise UserError(
                f"ppo.rewards: {reward.source}: data.reward_columns does not name the column {column!r}, so no prompt "
                "would have its expected value. Add it there."
            )
        elif isinstance(reward, ModelReward):
            name, _ = reward_model(reward, home)
            fixed = {"source": f"model:{name}"}
            if fixed["source"] != reward.source:
                notes.append(f"ppo.rewards: {reward.source} is now {name}")
        settled.append(reward.model_copy(update=fixed))
    ppo = config.ppo.model_copy(update={"rewards": tuple(settled)})
    return config.model_copy(update={"ppo": ppo}), notes


def _settled_rules(rules: RulesConfig) -> RulesConfig:
    """Return `rules` with the patterns of its file, or with the digest of its function's source.

    Raises:
        UserError: the file or the function is missing, or a pattern is invalid, or an action names no rule.
    """
    if (caller := rules.caller) is not None:
        return rules.model_copy(update={"root": str(root_of(caller)), "code": code_digest(caller)})
    if rules.file is None:
        return rules
    try:
        return rules.model_copy(update={"patterns": read_rules(rules.file)}).with_known_names()
    except ValueError as error:
        raise UserError(f"ppo.rules.file = {rules.file}: {error}.") from None


def read_rules(file: str) -> dict[str, str]:
    """Return the patterns of a YAML or JSON file, by name.

    Raises:
        UserError: there is no such file, or a rule in it is invalid.
    """
    path = user_path(file, "ppo.rules.file")
    patterns = yaml_text.read_mapping(path)
    if not patterns:
        raise UserError(
            f"ppo.rules.file = {file}: it has no rules. Write one per line, such as promise: (?i)we promise"
        )
    for name, pattern in patterns.items():
        if not isinstance(pattern, str):
            raise UserError(
                f"ppo.rules.file = {file}: {name}: the pattern {pattern!r:.80} is not text. Write it in quotes."
            )
        try:
            check_pattern(str(name), pattern)
        except ValueError as error:
            raise UserError(f"ppo.rules.file = {file}: {error}.") from None
    return {str(name): str(pattern) for name, pattern in patterns.items()}


def has_unversioned(config: RunConfig) -> bool:
    """Return whether a scorer reports no version, so that no stored result of PPO may be reused."""
    sources = config.ppo.rewards or ()
    return any(isinstance(source, HttpReward) and source.version_known == NO_VERSION for source in sources)


def reward_model(config: ModelReward, home: Path) -> tuple[str, Path]:
    """Return the path or hub name (with its commit) of a reward model of `ppo.rewards`, and its folder.

    Raises:
        UserError: there is no such model.
    """
    name = config.source.removeprefix("model:")
    field = "ppo.rewards: source"
    path = user_path(name, field)
    if path.is_dir():
        if not (path / "reward.json").is_file():
            check_weights(path, f"{field} = {config.source}")
        return name, path
    if is_hub_name(name) and not path.exists():
        return hub_model(name, home, field)
    raise UserError(
        f"{field} = {config.source}: there is no such folder ({path.absolute()}). Give the folder of a reward model, "
        f"or a sequence classifier of the hub as model:org/name@revision."
    )


def model_sources(config: RunConfig) -> Mapping[str, ModelReward]:
    """Return the reward models that `ppo.rewards` names, by name."""
    return {reward.name: reward for reward in config.ppo.rewards or () if isinstance(reward, ModelReward)}
