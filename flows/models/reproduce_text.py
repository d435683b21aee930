"""Print a reproduction: which results are the same, which metrics differ, and what could explain it."""

from collections.abc import Iterator

from components.base.text import counted
from flows.models.reproduce import Comparison, Reproduction, differences


def text(reproduction: Reproduction) -> Iterator[str]:
    """Yield the lines of the text."""
    width = max(len(pair.recorded.stage) for pair in reproduction.pairs) + 2
    for pair in reproduction.pairs:
        one, other = pair.recorded.digest[:12], pair.made.digest[:12]
        yield f"{pair.recorded.stage:<{width}}" + (f"{one}  the same" if pair.same else f"{one} -> {other}  different")
    if reproduction.same:
        count = counted(len(reproduction.pairs), "artifact")
        yield f"Reproduced: {reproduction.subject}, {count}, byte for byte the same."
        return
    yield from ("", f"{'metric':<44}{'recorded':>14}{'now':>14}{'difference':>14}")
    for pair in reproduction.pairs:
        yield from (f"{name:<44}{_shown(was)}{_shown(now)}{_shown(gap)}" for name, was, now, gap in _metrics(pair))
    yield ""
    for pair in reproduction.pairs:
        if not pair.same and pair.same_inputs:
            causes = differences(pair)
            unknown = "no recorded difference explains it: code, options, libraries and machine are the same."
            yield f"{pair.recorded.stage}: {'what could explain it:' if causes else unknown}"
            yield from (f"  {cause}" for cause in causes)
    yield f"The new results are in {reproduction.folder}; remove that folder when you no longer need it."


def _metrics(pair: Comparison) -> Iterator[tuple[str, float | None, float | None, float | None]]:
    was, now = pair.recorded.metrics, pair.made.metrics
    for name in sorted({*was, *now}):
        one, other = was.get(name), now.get(name)
        if str(one) != str(other):  # as text, because NaN does not equal itself
            yield name, one, other, None if one is None or other is None else other - one


def _shown(value: float | None) -> str:
    return f"{'none' if value is None else f'{value:.6g}':>14}"
