"""`tether show-config` and `tether plan`, and the arguments by which every command names a config."""

from typing import TYPE_CHECKING, Annotated

import typer

from components.base.errors import GateFailed
from flows.cli import completion
from flows.cli.command import Json, command, echo
from flows.environment import tether_home

if TYPE_CHECKING:
    from flows.config.profiles import Override
    from flows.config.run_config import RunConfig

config_commands = typer.Typer()

Profile = Annotated[
    str,
    typer.Argument(
        help="tiny, demo, demo-long, hh-smollm2, gpu, or a .yaml file.", autocompletion=completion.profiles
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set an option, for example ppo.kl.target=5.")
]


def overrides_of(set_: list[str] | None) -> "list[Override]":
    """Return the overrides of `--set`. Raises UserError as `parse_override` does."""
    from flows.config.profiles import parse_override

    return [parse_override(text) for text in set_ or []]


def config_of(profile: str, set_: list[str] | None) -> "RunConfig":
    """Return the config of a profile with its `--set` overrides. Raises UserError as `load_config` does."""
    from flows.config.run_config import load_config

    return load_config(profile, overrides_of(set_))


@command(config_commands, "show-config")
def show_config(profile: Profile, set_: Set = None) -> None:
    """Print a profile as YAML with every default.

    The output is a valid profile."""
    from flows.config.run_config import to_values
    from flows.config.yaml import dump

    echo(dump(to_values(config_of(profile, set_))), nl=False)


@command(config_commands, "plan")
def plan(
    profile: Profile,
    gpus: Annotated[int, typer.Option(metavar="N", min=0, help="GPUs that share a stage; 0 means a CPU.")] = 1,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory per GPU, or of the CPU's process: 80GB, 24GiB.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="Another model: smollm2-135m, llama-3.2-1b, llama-3.1-8b, or a model's folder or config.json.",
        ),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Print how much memory training needs.

    It lists each phase of sft, reward and ppo. Exit code 3 if a phase does not fit."""
    from flows.data.pretrained import find_base
    from flows.planning.shape import ModelShape, read_shape
    from flows.reports.memory_report import MemoryPlan, parse_size

    limit = None if memory is None else parse_size(memory)
    config = config_of(profile, set_)
    sft = config.sft
    if shape:
        size = read_shape(shape)
    elif sft.base is not None:
        size = ModelShape.of_path(find_base(sft.base, tether_home()), "sft.base")
    else:
        size = ModelShape.of_scratch(sft.scratch)
    memory_plan = MemoryPlan.of(profile, config, size, gpus, limit)
    echo(memory_plan.as_json() if as_json else memory_plan.text())
    if memory_plan.fits is False:
        raise typer.Exit(GateFailed.exit_code)
