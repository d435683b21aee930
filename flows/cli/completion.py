"""Shell completion of profiles, runs, stages and gates. It runs on each key press, so it imports nothing heavy."""

from flows.environment import tether_home


def profiles() -> list[str]:
    """Return the built-in profiles; the shell itself completes file names."""
    from flows.config.profiles import profile_names

    return profile_names()


def runs() -> list[str]:
    """Return the ids of runs, newest first."""
    folders = (path.parent.name for path in (tether_home() / "runs").glob("*/run.json"))
    return sorted(folders, reverse=True)


def stages() -> list[str]:
    """Return the names of the pipeline's stages, in order."""
    from tasks.stages import PIPELINE

    return list(PIPELINE)


def gates() -> list[str]:
    """Return the names of all gates."""
    from components.gates.table import GATES

    return list(GATES)
