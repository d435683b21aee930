"""What the shell completes: profiles, runs, stages, gates. A key press waits for it: nothing heavy is imported."""

from flows.environment import tether_home


def profiles() -> list[str]:
    """The built-in profiles; the shell itself completes files."""
    from flows.config.profiles import profile_names

    return profile_names()


def runs() -> list[str]:
    """Ids of runs, newest first."""
    folders = (path.parent.name for path in (tether_home() / "runs").glob("*/run.json"))
    return sorted(folders, reverse=True)


def stages() -> list[str]:
    """Names of stages, in their order."""
    from tasks.stages import PIPELINE

    return list(PIPELINE)


def gates() -> list[str]:
    """Names of gates."""
    from components.gates.table import GATES

    return list(GATES)
