"""Keep the scores of an outside scorer: a response that was scored once keeps its score, also after a kill."""

import json
from pathlib import Path
from typing import Any

from components.base.files import make_folder
from components.base.hashing import digest_json
from components.base.jsonl import AppendedLines
from components.rewards.source import Replies, Score, Source


class StoredScores:
    """A source whose scores are written to a file as they arrive, and read from there when the stage resumes.

    So a stage that is killed and resumed gets the same scores, even if the scorer would now answer differently.
    """

    def __init__(self, source: Source, path: Path) -> None:
        """Read the scores in `path`, without a last line that a kill cut off."""
        self._source = source
        make_folder(path.parent)
        self._lines = AppendedLines(path, _read)
        self._known = dict(self._lines.found)

    def score(self, replies: Replies) -> list[Score]:
        """Return scores, and ask the source only for those that are not known."""
        keys = [
            digest_json({"prompt": prompt, "response": response, "row": dict(row)})
            for prompt, response, row in zip(*replies[:3], strict=True)
        ]
        missing = {key: index for index, key in reversed(list(enumerate(keys))) if key not in self._known}
        indices = sorted(missing.values())
        if indices:
            prompts, responses, rows, _ = replies
            few = Replies([prompts[i] for i in indices], [responses[i] for i in indices], [rows[i] for i in indices])
            scores = self._source.score(few)
            fresh = {keys[i]: score for i, score in zip(indices, scores, strict=True)}
            self._lines.add(b"".join(json.dumps([key, score]).encode() + b"\n" for key, score in fresh.items()))
            self._known |= fresh
        return [self._known[key] for key in keys]

    def close(self) -> None:
        """Close the file and the source."""
        self._lines.close()
        self._source.close()


def _read(line: Any) -> tuple[str, Score]:
    answer, score = line
    parts = isinstance(score, list)
    return str(answer), [(int(offset), float(value)) for offset, value in score] if parts else float(score)
