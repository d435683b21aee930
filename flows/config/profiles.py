"""Read profiles and `--set` as plain YAML values, layered with `extends:`, before the config classes check them."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, get_args

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.nested import flatten, group, merge, nested, selected
from components.base.paths import user_path
from components.direct.config import PolicyConfig
from components.gates.methods import Method, is_used
from components.ppo.config import KL_LIMITS, OF_CRITIC_KIND, WITHOUT_CRITIC, CriticConfig, PpoConfig
from flows.config import yaml as yaml_text
from flows.config.removed import renamed

PROFILES = Path(__file__).parent / "profiles"


# Laid below a profile that replaces the built-in task by its own data: turns off what needs the simulated truth.
_WITHOUT_BUILT_IN_TASK: dict[str, JsonValue] = {
    "human_eval": {"judges": "people"},
    "gates": {"validate": {"annotator_agreement": None}, "policy": {"violations_excess": None}},
}


_MOST_EXTENDED, _DEEPEST = 20, 20
_NULL = ("null", "~")


class Override(NamedTuple):
    """One `--set a.b=c`."""

    path: tuple[str, ...]
    value: JsonValue


def profile_names() -> list[str]:
    """Return the names of the built-in profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def read_profile(profile: str | Path) -> dict[str, JsonValue]:
    """Return the values of a built-in profile or a YAML file, merged over the profile that it `extends:`.

    A value with a slash or a .yaml ending is a file, anything else the name of a built-in profile.

    Raises:
        UserError: there is no such profile, it is not readable, or it extends itself.
    """
    return _read(_find(str(profile), Path.cwd()), ())


def profile_name(profile: str | Path) -> str:
    """Return the profile's name for use in a run's id: the built-in profile's name, or the file's without its
    ending."""
    return Path(profile).stem if _is_file_name(str(profile)) else str(profile)


def parse_override(text: str) -> Override:
    """Parse `a.b=c` into a path and a YAML value.

    Raises:
        UserError: the equals sign, a part of the path or the value is missing.
    """
    where = f"--set {text if len(text) <= 100 else f'{text[:97]}...'}"
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path) or len(path) > _DEEPEST:
        raise UserError(f"{where}: expected KEY=VALUE, as in --set ppo.kl.coefficient=0.1.")
    parsed = yaml_text.parse(value, where)
    if parsed is None and value.strip().lower() not in _NULL:  # for example `--set a=$X` with X unset
        raise UserError(f"{where}: the value is empty. Write null for none, as in --set {key}=null.")
    return Override(path, parsed)


def apply_overrides(values: dict[str, JsonValue], overrides: Iterable[Override]) -> dict[str, JsonValue]:
    """Return a copy of `values` with the overrides applied in order.

    Raises:
        UserError: an override names a key below a plain value, or an option as for `refuse_unused`.
    """
    layer: dict[str, JsonValue] = {}
    for path, value in overrides:
        _refuse_reaching_into_values(lay(values, layer), path)
        layer = merge(layer, nested(path, value))
    layer = renamed(layer, "--set")
    refuse_unused(values, layer, "--set")
    return lay(values, layer)


_OF_ONLINE_DPO: dict[str, JsonValue] = {"advantage": "rloo", "group_size": 2, "pair_labels": "soft"}
"""The options of `ppo` that online DPO sets."""


def lay(below: dict[str, JsonValue], above: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return `above` merged over `below`, with renamed options under their present names.

    If `above` adds preferences and `below` generates them, the judges become people, and the gates that need simulated
    votes or the simulated policy are turned off, unless `above` sets them. If `above` chooses an advantage without a
    critic, the critic's options of `below` are left out; if it chooses a kind of critic, those of the other kind are.
    If it chooses a unit of KL, the limits of `below` in the other unit are. If it chooses online DPO, the options
    of `below` that online DPO does not use are left out, and responses come in pairs. If it chooses another method
    after online DPO, the options that online DPO set are left out.
    """
    new, old = (group(values, "data").get("preferences") for values in (above, below))
    if new is not None and old is None and below:
        below = merge(below, _WITHOUT_BUILT_IN_TASK)
    ppo, new_ppo, method = group(below, "ppo"), group(above, "ppo"), _method(below, above)
    has_critic, kind = new_ppo.get("advantage") not in WITHOUT_CRITIC, group(new_ppo, "critic").get("kind")
    unit, online = group(new_ppo, "kl").get("unit"), method == "online_dpo"
    other_unit = unit not in (None, group(ppo, "kl").get("unit", "response"))
    was_online = _method(below, {}) == "online_dpo" and not online

    def remains(option: str) -> bool:
        part, _, name = option.partition(".")
        return (
            (part != "critic" or (has_critic and kind in (None, OF_CRITIC_KIND.get(name, kind))))
            and not (other_unit and part == "kl" and name in KL_LIMITS)
            and not (was_online and option in _OF_ONLINE_DPO)
            and not (online and not is_used("online_dpo", f"ppo.{option}"))
        )

    below = below | ({"ppo": selected(ppo, remains)} if ppo else {})
    if online:
        below = below | {"ppo": merge(_OF_ONLINE_DPO, group(below, "ppo"))}
    return merge(below, above)


def _method(below: dict[str, JsonValue], above: dict[str, JsonValue]) -> JsonValue:
    """Return `policy.method` of `above` merged over `below`."""
    return merge(group(below, "policy"), group(above, "policy")).get("method", "ppo")


def refuse_unused(below: dict[str, JsonValue], above: dict[str, JsonValue], source: str) -> None:
    """Refuse options of `ppo` and `policy` in `above` that the method does not use, or the critic (`ppo.advantage` has
    none, or one of another kind). Those of `below` are ignored.

    Three cases are allowed: a profile that names no method may set options of `policy`, for users who choose a method;
    a config that `tether show-config` printed has all options; and a critic's may have the default or `below`'s value.

    Raises:
        UserError: there is such an option.
    """
    if (method := _method(below, above)) not in get_args(Method):
        return  # the config classes name the methods
    for name, kind in (("ppo", PpoConfig), ("policy", PolicyConfig)):
        options, fields = group(above, name), kind.model_fields.keys()
        unnamed = source != "--set" and "method" not in {*group(below, "policy"), *options}
        if options.keys() >= fields or (name == "policy" and unnamed):
            continue
        for option in flatten(dict(options)):
            if option.split(".")[0] in fields and not is_used(str(method), f"{name}.{option}"):
                raise UserError(
                    f"{source}: {name}.{option} has no effect with policy.method={method}. Leave it out, or choose a "
                    "method that uses it."
                )
    ppo, defaults = merge(group(below, "ppo"), group(above, "ppo")), CriticConfig().model_dump()
    advantage, kind = ppo.get("advantage"), group(ppo, "critic").get("kind", defaults["kind"])
    for option, value in group(above, "ppo", "critic").items():
        needed = OF_CRITIC_KIND.get(option, kind)
        if value in (defaults.get(option, value), group(below, "ppo", "critic").get(option)):
            continue
        if advantage in WITHOUT_CRITIC:
            reason, use = f"ppo.advantage={advantage} has no critic", "advantage=gae"
        elif needed != kind and kind in OF_CRITIC_KIND.values():
            reason, use = f"it is an option of a {needed} critic, and this one is {kind}", f"critic.kind={needed}"
        else:
            continue
        raise UserError(
            f"{source}: ppo.critic.{option} ({value}) has no effect, because {reason}. Leave it out, or use ppo.{use}."
        )


def _is_file_name(profile: str) -> bool:
    return "/" in profile or profile.endswith((".yaml", ".yml"))


def _find(profile: str, base: Path) -> Path:
    if _is_file_name(profile):
        path = base / user_path(profile, "the profile")
        if not user_path(str(path), "the profile").is_file():
            raise UserError(f"{profile}: no such file (looked for {path}).")
        return path.resolve()
    names = profile_names()
    if profile not in names:
        near = difflib.get_close_matches(profile, names, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UserError(f"{profile}: no such profile. {hint}There are {', '.join(names)}; or name a .yaml file.")
    return PROFILES / f"{profile}.yaml"


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, JsonValue]:
    if len(above) > _MOST_EXTENDED:
        raise UserError(f"{above[0]}: more than {_MOST_EXTENDED} profiles extend each other. Write some into one.")
    if path in above:
        chain = " → ".join(p.name for p in (*above, path))
        raise UserError(f"{path}: extends itself ({chain}).")
    values = renamed(yaml_text.read_mapping(path), str(path))
    parent = values.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise UserError(f"{path}: extends = {parent!r}: must be a profile's name or a .yaml file.")
    below = {} if parent is None else _read(_find(parent, path.parent), (*above, path))
    refuse_unused(below, values, str(path))
    return lay(below, values)


def _refuse_reaching_into_values(values: dict[str, JsonValue], path: tuple[str, ...]) -> None:
    for depth, part in enumerate(path[:-1], start=1):
        below = values.get(part)
        if below is None:
            return
        if not isinstance(below, dict):
            key = ".".join(path[:depth])
            raise UserError(f"--set {'.'.join(path)}: {key} is a value ({below!r}), not a group of keys.")
        values = below
