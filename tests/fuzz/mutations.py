"""Bounded changes of a file's bytes, drawn by hypothesis: what it finds is made small by hypothesis too."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

Mutation = Callable[[bytes], bytes]

LARGEST = 1 << 20
"""No mutated file is larger; what it may unpack to is its reader's business."""

TOKENS = [
    *(b"NaN", b"-Infinity", b"null", b"true", b"-1", b"1e999", b"2147483648", b"18446744073709551616", b"9" * 400),
    *(b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"]}" * 40, b'"', b"'", b"\\", b"\\u0000", b'"\\ud800"', b"\0"),
    *(b"\x1b[2J", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc0\x80", b"\r", b"\n", b"\r\n\r\n", b"\t", b",", b";", b":"),
    *(b"{", b"}", b"[", b"]", b"=cmd|' /C calc'!A0", b"../../../x", b"/dev/zero", b"%s%n{0}", b"<script>"),
    *(b"prompt", b"chosen", b"votes", b'"prompt": "again", ', b"&a [*a, *a]", b"*a", b"!!int ", b"<<: ", b"---\n"),
    *(b"!!python/name:os.system ", b"extends: x.yaml\n", b"? ", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"),
    *(b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"PAR1", b"PK\x03\x04", b"\x1f\x8b\x08\0\0\0\0\0"),
]
"""What readers trip over, whole."""

_PLACES = st.integers(0, 1 << 16)
_SOME = st.integers(1, 64) | st.integers(1, 1 << 14)


def _at(place: int, data: bytes) -> int:
    return place * len(data) >> 16


def _flip(place: int, bit: int) -> Mutation:
    def flip(data: bytes) -> bytes:
        at = min(_at(place, data), len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] if data else data

    return flip


def _truncate(place: int) -> Mutation:
    return lambda data: data[: _at(place, data)]


def _insert(place: int, token: bytes) -> Mutation:
    return lambda data: data[: _at(place, data)] + token + data[_at(place, data) :]


def _overwrite(place: int, token: bytes) -> Mutation:
    return lambda data: data[: _at(place, data)] + token + data[_at(place, data) + len(token) :]


def _delete(place: int, count: int) -> Mutation:
    return lambda data: data[: _at(place, data)] + data[_at(place, data) + count :]


def _duplicate(place: int, count: int, target: int, times: int) -> Mutation:
    def duplicate(data: bytes) -> bytes:
        piece = data[_at(place, data) :][:count] * times
        return data[: _at(target, data)] + piece + data[_at(target, data) :]

    return duplicate


MUTATIONS: st.SearchStrategy[Sequence[Mutation]] = st.lists(
    st.one_of(
        st.builds(_flip, _PLACES, st.integers(0, 7)),
        st.builds(_truncate, _PLACES),
        st.builds(_insert, _PLACES, st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=16)),
        st.builds(_overwrite, _PLACES, st.sampled_from(TOKENS)),
        st.builds(_delete, _PLACES, _SOME),
        st.builds(_duplicate, _PLACES, _SOME, _PLACES, st.integers(1, 8)),
    ),
    min_size=1,
    max_size=5,
)


def mutated(data: bytes, mutations: Sequence[Mutation]) -> bytes:
    """`data` with each of `mutations` made after the other."""
    for mutation in mutations:
        data = mutation(data)[:LARGEST]
    return data
