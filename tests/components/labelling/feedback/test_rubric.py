"""The question, and which answers are verdicts."""

import pytest

from components.labelling.feedback.rubric import question, verdict


def test_the_question_holds_rubric_conversation_and_both_responses_and_fills_nothing_inside_them() -> None:
    prompt = [{"role": "user", "content": "Hi {second}"}, {"role": "assistant", "content": "Yes?"}]
    (message,) = question("Be kind.\n", prompt, "one {rubric}", "two")
    assert message["role"] == "user"
    assert message["content"].startswith("Be kind.\n\n<conversation>\nuser: Hi {second}\n\nassistant: Yes?\n")
    assert "<response_a>\none {rubric}\n</response_a>" in message["content"]
    assert "<response_b>\ntwo\n</response_b>" in message["content"]


@pytest.mark.parametrize(
    ("text", "preferred"),
    [
        ("A", 1.0), ("b.", 0.0), ("**B**", 0.0), ("Answer: A", 1.0), ("Response B", 0.0),
        ("Response A is better.", 1.0),
        ("The better response is B", 0.0), ("The first is rude.\nSo the second one.\n\nVerdict: B", 0.0), ("Tie", 0.5),
        ("<think>B? No.\nB</think>\nA", 1.0), ("A\n\nIt answers the question, B does not.", 1.0),
        ("A better answer would name the day.", None), ("", None), ("I can't say.", None), ("AB", None),
        ("Both A and B have merits", None), ("\n", None),
    ],
)  # fmt: skip
def test_only_a_line_that_is_a_verdict_counts(text: str, preferred: float | None) -> None:
    assert verdict(text) == preferred
