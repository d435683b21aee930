"""`tether sweep`: runs over options and seeds, and one table and page of their outcomes."""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from components.base.errors import TetherError, UserError
from flows.cli.command import Json, command, echo
from flows.cli.config import Profile, Set
from flows.environment import tether_home

if TYPE_CHECKING:
    from flows.studies.level_kl import Band

sweep_commands = typer.Typer()


@command(sweep_commands, "sweep")
def sweep(
    profile: Profile,
    over: Annotated[
        list[str],
        typer.Option(metavar="OPTION=V1,V2", help="An option and its values; repeat it for every combination."),
    ],
    set_: Set = None,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Seeds of the policy: 0 to N - 1.")] = 1,
    level_kl: Annotated[
        bool, typer.Option("--level-kl", help="Choose each method's strength so that KL lands in one band.")
    ] = False,
    kl: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="The band (default: the profile's ppo.kl.target ± 20 %).")
    ] = None,
    minutes: Annotated[float | None, typer.Option(metavar="M", min=0, help="Begin no run after this time.")] = None,
    sheet: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="A blind sheet of N items over the policies and SFT.")
    ] = None,
    json_: Json = False,
) -> None:
    """Run every combination of options' values, and compare the outcomes.

    Data, SFT and reward model are shared; a cell ends after PPO. A failed gate is an outcome. The same command
    continues a sweep that was stopped.

    \b
    tether sweep demo --over ppo.kl.target=1,2,4 --seeds 3
    tether sweep demo --over ppo.advantage=gae,rloo --set ppo.group_size=2 --level-kl
    tether sweep demo --over reward.epochs=1,2 --level-kl --kl 2,3 --minutes 30
    """
    from rich.console import Console

    from flows.studies.sweep import Sweep, run_sweep
    from flows.studies.sweep_page import print_sweep, write_page

    if kl is not None and not level_kl:
        raise UserError("--kl is the band of --level-kl. Give both.")
    outcome = Sweep(profile, over, set_ or [], seeds, level_kl, _band(kl))
    with redirect_stdout(sys.stderr) if json_ else nullcontext():
        page = write_page(run_sweep(tether_home(), outcome, minutes, sheet), outcome)
    if json_:
        echo((page.parent / "sweep.json").read_text(encoding="utf-8"))
    else:
        print_sweep(Console(), outcome)
        echo(f"page: {page}")
    if refused := [f"{group.name}: {group.search}" for group in outcome.groups if group.search and not group.cells]:
        raise UserError(" ".join(refused))
    if failed := [cell.run for group in outcome.groups for cell in group.cells if cell.state == "failed"]:
        raise TetherError(f"{', '.join(failed)}: a check stopped the run (see above). The same command tries it again.")
    if sheet and len(outcome.models("sft")) > 1:  # not for an option, which is refused before, but for the machine
        raise UserError("--sheet compares the policies with one SFT model, and these have several: no sheet was begun.")


def _band(text: str | None) -> "Band | None":
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not 0 < low < high < float("inf"):
        raise UserError(f"--kl {text}: expected LOW,HIGH with 0 < LOW < HIGH, as in --kl 2.4,3.6.")
    return low, high
