"""Processes forked from pytest's own."""

import multiprocessing
import os
import sys
import traceback

import pytest

CONTEXT = multiprocessing.get_context("fork")


class Forked(CONTEXT.Process):
    """A forked process that ends with its target: 0, or 1 and a traceback if it raised.

    It runs no exit handler that it inherits: after a Prefect flow in pytest's process, Prefect's handler fails in every
    process forked from there (it expects what its own reset after a fork took away), and the process ends with 1.

    The test is skipped if this process uses a GPU, because a fork can't use it too.
    """

    def start(self) -> None:
        """Fork."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            pytest.skip("this process uses a GPU, which no process that is forked from it can use")
        super().start()

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
