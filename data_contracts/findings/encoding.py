"""Encode many texts into token ids: with fastokens if it reads the tokenizer, otherwise with `tokenizers`.

Both give the same ids, and fastokens takes a twentieth of the time. It reads byte-level BPE with the pre-tokenizers of
GPT-2, Llama 3, Qwen and SmolLM2, among others, and refuses a tokenizer with a part that it does not know.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_COMPARED = 100
"""Number of texts that both libraries encode before only fastokens is used."""


class Encoded(NamedTuple):
    """The token ids of n texts."""

    ids: NDArray[np.uint32]
    """Ids of all texts, one text after the other."""
    ends: NDArray[np.int64]
    """(n + 1,); text i has `ids[ends[i] : ends[i + 1]]`."""

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each text (n,)."""
        return np.diff(self.ends)

    def of(self, index: int) -> NDArray[np.uint32]:
        """Return the ids of one text."""
        return self.ids[self.ends[index] : self.ends[index + 1]]


class Encoder:
    """Encodes texts with one tokenizer. No special tokens are added; those in a text are recognised."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._fast = _fastokens(self._tokenizer)
        self._compared = False

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of `texts`."""
        if self._fast is not None and not self._compared and texts:
            some = texts[:_COMPARED]
            fast, slow = _by_fastokens(self._fast, some), _by_tokenizers(self._tokenizer, some)
            if not (np.array_equal(fast.ids, slow.ids) and np.array_equal(fast.ends, slow.ends)):
                logger.warning("fastokens and tokenizers disagree about this tokenizer: only tokenizers is used")
                self._fast = None
            self._compared = True
        return _by_tokenizers(self._tokenizer, texts) if self._fast is None else _by_fastokens(self._fast, texts)


def _fastokens(tokenizer: Any) -> Any:
    """Return fastokens' form of a tokenizer; None if it does not support the tokenizer, or is not installed."""
    try:
        import fastokens

        return fastokens.Tokenizer.from_json_str(tokenizer.to_str())
    except ImportError:
        logger.warning("fastokens is not installed: tokens are counted more slowly; run `make install`")
    except ValueError as refused:
        logger.debug("fastokens does not support this tokenizer: %s", refused)
    return None


def _by_fastokens(fast: Any, texts: Sequence[str]) -> Encoded:
    ids, ends = fast.encode_batch_flat(list(texts), add_special_tokens=False)
    return Encoded(np.frombuffer(ids, "<u4"), np.frombuffer(ends, "<u8").astype(np.int64))


def _by_tokenizers(tokenizer: Any, texts: Sequence[str]) -> Encoded:
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ids = [np.empty(0, np.uint32), *(np.array(encoding.ids, np.uint32) for encoding in encodings)]
    return Encoded(np.concatenate(ids), np.cumsum([0, *map(len, encodings)]))
