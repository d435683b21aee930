"""What was made of what, from records alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.store.graph import Graph
from components.store.records import Record

SOURCE = digest_json("a file")


def record(name: str, *inputs: str, started: str = "") -> Record:
    """An artifact called `name`, made of digests."""
    given = {f"input_{i}": digest for i, digest in enumerate(inputs)}
    files = {"value": digest_json(name)}
    return Record(stage=name, key=digest_json(["key", name, started]), digest=digest_json(files), files=files,
                  inputs=given, started=started, attempt=1)  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> list[Record]:
    """Up to eight artifacts, each made of some of the earlier ones and perhaps of a file, in any order."""
    records: list[Record] = []
    for i in range(draw(st.integers(1, 8))):
        earlier = [each.digest for each in records]
        taken = [digest for digest in [*earlier, SOURCE] if draw(st.booleans())]
        records.append(record(str(i), *taken))
    return draw(st.permutations(records))


@given(graphs())
def test_upstream_is_all_that_went_in_and_inputs_come_first(records: list[Record]) -> None:
    graph, by_digest = Graph(records), {each.digest: each for each in records}

    def made_of(digest: str) -> set[str]:
        inputs = set(by_digest[digest].inputs.values()) if digest in by_digest else set()
        return inputs.union(*(made_of(each) for each in inputs))

    for each in records:
        found = [node.digest for node in graph.upstream([each.digest])]
        assert set(found) == made_of(each.digest) | {each.digest} and len(found) == len(set(found))
        for digest in found:
            inputs = by_digest[digest].inputs.values() if digest in by_digest else []
            assert all(found.index(one) < found.index(digest) for one in inputs)


@given(graphs())
def test_downstream_is_the_reverse_of_upstream(records: list[Record]) -> None:
    graph = Graph(records)
    digests = {each.digest for each in records} | {SOURCE}
    below = {one: {node.digest for node in graph.downstream([one])} for one in digests}
    above = {one: {node.digest for node in graph.upstream([one])} for one in digests}
    assert all((one in below[other]) == (other in above[one]) for one in digests for other in digests)
    for one in digests:
        order = [node.digest for node in graph.downstream([one])]
        place = {digest: i for i, digest in enumerate(order)}
        assert all(place[given] < place[d] for d in order for given in graph.inputs(d).values() if given in place)


def test_an_artifact_of_two_keys_is_one_node_of_all_that_either_was_made_of() -> None:
    old, new = record("model", digest_json("one"), started="1"), record("model", digest_json("two"), started="2")
    graph = Graph([old, new])
    nodes = graph.upstream([old.digest])
    assert {node.digest for node in nodes} == {old.digest, digest_json("one"), digest_json("two")}
    assert nodes[-1].records == (new, old) and nodes[0].names == ("input_0",)


def test_what_a_run_took_is_of_what_its_own_key_was_made_of_though_another_gave_the_same() -> None:
    old, new = record("model", digest_json("one"), started="1"), record("model", digest_json("two"), started="2")
    other = record("other", old.digest)
    graph = Graph([old, new, other]).of_keys({old.key})
    assert graph.inputs(old.digest) == old.inputs and graph.node(old.digest).records == (old,)
    assert [node.digest for node in graph.upstream([other.digest])] == [digest_json("one"), old.digest, other.digest]


def test_the_beginning_of_a_digest_or_key_is_enough_unless_two_begin_so() -> None:
    one = record("one", SOURCE)
    graph = Graph([one])
    assert graph.find(one.digest[:8]) == graph.find(one.key[:8]) == one.digest
    assert graph.find(SOURCE[:8]) == SOURCE
    assert graph.find("0" * 60) is None and graph.find(one.digest[:5]) is None
    twin = one.model_copy(update={"digest": one.digest[:8] + "0" * 56})
    with pytest.raises(UserError, match="several artifacts have a digest that begins so"):
        Graph([one, twin]).find(one.digest[:8])
