import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.formats.transcripts import as_messages, before_response, split_messages, transcript_messages
from components.data.rows import BadRow

# Words of a turn: anything but white space at the ends and but the marks that part turns.
words = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1).map(str.strip).filter(
    lambda text: text and "\n\nHuman:" not in f"\n\n{text}" and "\n\nAssistant:" not in f"\n\n{text}"
)  # fmt: skip
turns = st.lists(st.tuples(st.sampled_from(["Human", "Assistant"]), words), min_size=1, max_size=6)


@given(turns, words)
def test_a_transcript_comes_apart_into_the_turns_it_was_written_from(turns, response):
    text = "".join(f"\n\n{who}: {said}" for who, said in turns) + f"\n\nAssistant: {response}"
    before, found = before_response(text)
    prompt = transcript_messages(before)
    assert found == response
    assert [(m["role"], m["content"]) for m in prompt] == [
        ("user" if who == "Human" else "assistant", said) for who, said in turns
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n\nHuman: hello", "no assistant turn"),
        ("\n\nAssistant: hello", "no turn before the response"),
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c", "ends with a human turn"),
        ("", "no assistant turn"),
    ],
)
def test_a_transcript_without_a_last_assistant_turn_is_a_bad_row(text, reason):
    with pytest.raises(BadRow, match=reason):
        transcript_messages(before_response(text)[0])


def test_words_before_the_first_turn_are_a_system_message():
    assert transcript_messages("Be kind.\n\nHuman: a")[0] == {"role": "system", "content": "Be kind."}


def test_a_transcript_prompt_loses_only_its_open_assistant_turn():
    assert as_messages("\n\nHuman: a\n\nAssistant:", "prompt") == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "value", [None, 3, [], [3], [{"role": "judge", "content": "a"}], [{"role": "user", "content": 1}]]
)
def test_a_prompt_of_another_type_is_a_bad_row_that_names_the_field(value):
    with pytest.raises(BadRow, match="prompt"):
        as_messages(value, "prompt")


def test_a_conversation_that_ends_with_the_user_is_a_bad_row():
    with pytest.raises(BadRow, match="doesn't end with an assistant turn"):
        split_messages([{"role": "user", "content": "a"}], "chosen")


@pytest.mark.parametrize(
    ("user", "assistant", "system"),
    [
        ("human", "bot", "system"), ("user", "model", "developer"), ("Human", "AI", "System"),
        ("prompter", "gpt", "system"), ("user ", " assistant", "system"),
    ],
)  # fmt: skip
def test_roles_of_other_makers_are_the_three_that_are_known(user, assistant, system):
    said = [{"role": role, "content": role} for role in (system, user, assistant)]
    before, response = split_messages(said, "m")
    assert ([m["role"] for m in before], response) == (["system", "user"], assistant)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"name": "f"}]), ("images", ["a.png"]), ("reasoning_details", [{"text": "Hm."}])],
)
def test_what_a_message_has_beside_its_text_is_refused(field, value):
    with pytest.raises(BadRow, match=rf"`m\[0\]\.{field}`"):
        as_messages([{"role": "system", "content": "a", field: value}], "m")
    for nothing in (None, [], {}, "", [{}], {"name": None}):
        assert as_messages([{"role": "system", "content": "a", field: nothing}], "m")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "value": "a"}, {"type": "text", "text": "b"}], ["a", "b"],
        [{"type": "input_text", "text": "a"}, {"text": "b"}],
    ],
)  # fmt: skip
def test_parts_of_text_are_read_under_any_of_their_keys(content):
    assert as_messages([{"role": "user", "content": content}], "m") == [{"role": "user", "content": "a\nb"}]
    assert as_messages([{"role": "user", "parts": content}], "m") == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize("part", [{"type": "thinking", "text": "Hm."}, {"type": "image_url"}, {"type": "text"}, 1])
def test_a_part_that_is_not_the_text_is_refused(part):
    with pytest.raises(BadRow, match="has a part that is not text"):
        as_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}], "m")


@pytest.mark.parametrize("role", ["tool", "narrator", None])
def test_an_unknown_role_is_refused_with_those_that_are_known(role):
    with pytest.raises(BadRow, match=r"expected user \(or human\), assistant \(or gpt, model, bot, ai\) or system"):
        as_messages([{"role": role, "content": "a"}], "m")
