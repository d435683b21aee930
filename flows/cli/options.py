"""Options that several commands have, and what they name."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flows.config.run_config import RunConfig

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as ppo.kl.target=5.")
]


def config_of(profile: str, set_: list[str] | None) -> "RunConfig":
    """The configuration of a profile with its `--set` overrides."""
    from flows.config.profiles import parse_override
    from flows.config.run_config import load_config

    return load_config(profile, [parse_override(text) for text in set_ or []])
