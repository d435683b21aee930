"""Processes forked from pytest's own."""

import multiprocessing
import os
import sys
import traceback

CONTEXT = multiprocessing.get_context("fork")


class Forked(CONTEXT.Process):
    """A forked process that ends with its target: 0, or 1 and a traceback if it raised.

    It runs no exit handler that it inherits: after a Prefect flow in pytest's process, Prefect's handler fails in every
    process forked from there (it expects what its own reset after a fork took away), and the process ends with 1.
    """

    def run(self) -> None:
        """Call the target and leave."""
        code = 1
        try:
            super().run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
