"""The program of one rank, started by the agent: the stage's own function, on this rank's device.

    python -m components.distributed.entry FOLDER PARENT

Rank 0 reads `FOLDER/program.json` and sends it to the others. It writes what the stage observes, one JSON object per
line, and at the end the metrics. A rank that fails writes its error.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.files import replacing
from components.base.observe import Observe, unobserved
from components.base.process import this_process
from components.distributed import outcome
from components.distributed.orphans import die_with_parent

AGENT, PROGRAM, OBSERVED, METRICS = "agent.json", "program.json", "observed.jsonl", "metrics.json"
TIMEOUT = "TETHER_RANK_TIMEOUT"
ENDED = "tether/ended"
"""The key in the ranks' shared key-value store under which a failing rank writes its error."""
OVER = "tether/over"
"""The key that rank 0 sets when the stage has ended."""


def done_file(folder: Path, rank: int) -> Path:
    """Return the file that rank `rank` creates when it succeeds."""
    return folder / f"done-{rank}"


def main(folder: Path) -> int:
    """Compute this rank's part; return the exit code."""
    rank = int(os.environ["RANK"])
    (folder / f"process-{rank}.json").write_text(json.dumps(this_process()), encoding="utf-8")
    wanted = json.loads((folder / AGENT).read_text(encoding="utf-8"))
    shared: list[Any] = []
    try:
        with _named(wanted["within"])():
            _compute(folder, rank, shared)
            if wanted["hosts"]["number"] > 0:
                _wait_for_end(*shared)
    except BaseException as error:
        outcome.write_ended(folder, _cause(outcome.failed(rank, error), *shared))
        return 1
    finally:
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                for store in shared:
                    store.set(OVER, "")
    done_file(folder, rank).touch()
    return 0


def _wait_for_end(store: Any) -> None:
    """Wait on another host until rank 0 has ended the stage.

    If this host left earlier, it would join the next stage while the first host still serves this stage's store, and
    would find the old addresses there.
    """
    with contextlib.suppress(RuntimeError):  # the host with the store is gone
        while not store.check([OVER]):
            time.sleep(1)


def _cause(ended: outcome.Ended, store: Any = None) -> outcome.Ended:
    """Return what ended this rank. If it lost another rank, return that rank's error, which may be on another host.

    `store` is the key-value store that all ranks share.
    """
    try:
        if store is not None and not ended.of_ranks:
            store.set(ENDED, json.dumps(asdict(ended)))
        elif store is not None and store.check([ENDED]):
            return outcome.Ended(**json.loads(store.get(ENDED)))
    except (RuntimeError, ValueError):  # the host with the store is gone
        pass
    return ended


def _compute(folder: Path, rank: int, shared: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    from components.distributed import ranks

    # gloo reduces tensors on the CPU (metrics, and what ranks decide together), so that nothing waits for the GPU.
    limit = timedelta(seconds=float(os.environ[TIMEOUT]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=limit)
    shared.append(dist.distributed_c10d._get_default_store())
    text = (folder / PROGRAM).read_text(encoding="utf-8") if rank == 0 else ""
    program = json.loads(ranks.text_of_first(text))
    job = _named(program["job"]).model_validate(program["values"])
    if ranks.size() != job.runtime.ranks:
        raise UserError(
            f"runtime.ranks is {job.runtime.ranks}, and the hosts have started {ranks.size()}. Start every other host "
            f"with `python -m tasks.rank_processes --ranks {job.runtime.ranks}`."
        )
    _named(program["setup"])(job.runtime)
    if job.runtime.device == "cuda":  # this starts CUDA, so it comes after the setup
        torch.cuda.set_device(ranks.local_rank())
    inputs = {name: Path(path) for name, path in program["inputs"].items()}
    observe = _observed(folder / OBSERVED) if rank == 0 else unobserved  # which observe the same
    try:
        metrics = _named(program["run"])(job, inputs, Path(program["out"]), observe)
    except ranks.Finished:  # rank 0 computes the rest, and writes the metrics
        return
    # Not after an error: NCCL would wait there for ranks that wait for this one, and the error would not be written.
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        with replacing(folder / METRICS) as temporary:
            temporary.write_text(json.dumps({name: float(value) for name, value in metrics.items()}))


def _named(what: str) -> Any:
    module, _, name = what.partition(":")
    return getattr(importlib.import_module(module), name)


def _observed(path: Path) -> Observe:
    """Return what writes a stage's observations to the file that the stage's own process reads."""
    file = path.open("w", encoding="utf-8")

    def observe(step: int, metrics: Mapping[str, float], total: int | None = None, **progress: Any) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        file.write(json.dumps({"step": step, "metrics": values, "total": total, **progress}) + "\n")
        file.flush()

    return observe


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's shutdown may abort, and a rank that a signal ends has failed
