"""Scores that are kept: a response that an outside scorer has scored once keeps its score, also after a kill."""

import json
import os
from pathlib import Path
from typing import Any

from components.base.files import make_folder
from components.base.hashing import digest_json
from components.rewards.source import Replies, Score, Source


class KeptScores:
    """A source whose scores are written to a file as they come, and read from there when the stage goes on.

    So a stage that is killed and resumed gets the scores that it had, whatever the scorer says by then.
    """

    def __init__(self, source: Source, path: Path) -> None:
        """Read the scores that `path` has; a last line that a kill cut off is left out."""
        self._source, self._known = source, dict[str, Score]()
        make_folder(path.parent)
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
            try:
                answer, score = json.loads(line)
                known = {str(answer): _read(score)} if line.endswith(b"\n") else {}
            except (ValueError, TypeError):
                known = {}
            if not known:
                break
            self._known |= known
            whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def score(self, replies: Replies) -> list[Score]:
        """Scores; only what is not known is asked for."""
        keys = [
            digest_json({"prompt": prompt, "response": response, "row": dict(row)})
            for prompt, response, row in zip(*replies, strict=True)
        ]
        missing = {key: index for index, key in reversed(list(enumerate(keys))) if key not in self._known}
        asked = sorted(missing.values())
        if asked:
            prompts, responses, rows = replies
            few = Replies([prompts[i] for i in asked], [responses[i] for i in asked], [rows[i] for i in asked])
            scores = self._source.score(few)
            found = {keys[i]: score for i, score in zip(asked, scores, strict=True)}
            self._file.write(b"".join(json.dumps([key, score]).encode() + b"\n" for key, score in found.items()))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._known |= found
        return [self._known[key] for key in keys]

    def close(self) -> None:
        """Close the file and the source."""
        self._file.close()
        self._source.close()


def _read(score: Any) -> Score:
    return [(int(offset), float(value)) for offset, value in score] if isinstance(score, list) else float(score)
