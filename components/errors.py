"""One exception hierarchy. The exit code of a command is a property of what went wrong."""


class TetherError(Exception):
    """Something of ours broke (exit code 1)."""

    exit_code = 1


class UserError(TetherError):
    """The user's mistake: the message names the file, row or field and says what to do (exit code 2)."""

    exit_code = 2


class MachineMismatch(UserError):
    """This machine is not the one that the run's config was resolved for."""


class GateFailed(TetherError):
    """A gate did not pass and was not waived (exit code 3)."""

    exit_code = 3


class CheckFailed(TetherError):
    """A check of the learning that runs beside it (finite losses, matching log-probs, ...) did not hold."""
