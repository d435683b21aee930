"""Compute a long list in chunks that survive an interruption."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from components.base.files import make_folder, read_with_digest, replacing, with_digest
from components.models.config import GenerationConfig
from components.models.runtime import Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")
Row = TypeVar("Row")


def in_chunks(
    items: Sequence[T],
    size: int,
    checkpoint: Path,
    compute: Callable[[Sequence[T], int], list[Row]],
    done: Callable[[int], None],
) -> list[Row]:
    """Call `compute(chunk, start)` for every `size` items in turn; return all rows, which must be JSON values.

    A computed chunk is written to `<checkpoint>-<start>.json`; an undamaged chunk there is not computed again. If a
    chunk's rows depend only on its items and `start`, an interrupted run ends with the same rows. `done` is called
    after every chunk with the number of rows so far, including those found on disk. All ranks call it: they compute the
    same rows, and the files are the first rank's.
    """
    from components.distributed import ranks  # which imports torch, and readers of the human evaluation need none

    if ranks.is_first():
        make_folder(checkpoint.parent)
    results: list[Row] = []
    for start in range(0, len(items), size):
        file = checkpoint.with_name(f"{checkpoint.name}-{start:06d}.json")
        rows = ranks.result_of_first(partial(_computed_before, file))
        if rows is None:
            document = with_digest(compute(items[start : start + size], start))
            if ranks.is_first():
                with replacing(file) as temporary:
                    temporary.write_text(document, encoding="utf-8")
            rows = ranks.result_of_first(partial(read_with_digest, file))
        results += rows
        done(len(results))
    return results


def sample_in_chunks(
    load: Callable[[], tuple[Any, Any]],
    prompts: Sequence[Any],
    generation: GenerationConfig,
    runtime: Runtime,
    seed: Sequence[Any],
    size: int,
    checkpoint: Path,
    done: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Return a model's response to each of `prompts` (messages), computed `in_chunks`: its `text`, and whether it
    `ended` before the cap.

    Args:
        load: returns the model and its tokenizer; called for each chunk that has to be computed.
        seed: parts of the chunks' seeds, which differ by model: shared random numbers would make similar models give
            similar responses.
    """

    def generate(chunk: Sequence[Any], start: int) -> list[dict[str, Any]]:
        from components.models.sampling import generate_responses
        from components.training.loop import torch_seed

        responses = generate_responses(*load(), chunk, generation, torch_seed(*seed, start), runtime, size)
        return [{"text": response.text, "ended": response.ended} for response in responses]

    return in_chunks(prompts, size, checkpoint, generate, done)


def _computed_before(file: Path) -> Any:
    """Return the rows of a chunk's file; None if it is missing or damaged."""
    try:
        return read_with_digest(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("computing a damaged chunk again: %s", error)
        return None
