import pytest

from components.base.errors import UserError
from components.data.formats import demonstrations
from components.data.formats.pairs import detect, parse_pair, parse_pairs
from components.data.rows import Ballot, Problem, RawRow

USER = {"role": "user", "content": "hi"}
LONG = 20_000


def says(text):
    return {"role": "assistant", "content": text}


def read(data, most=LONG):
    """The row as its own fields say it should be read."""
    raw = RawRow(7, data)
    return parse_pair(raw, detect([raw], "x.jsonl"), "preferences", most)


def reasons(data, most=LONG):
    return [(p.check, p.text) for p in read(data, most).problems]


PAIR = {
    "prompt": [USER], "chosen": "good", "rejected": "bad", "margin": None, "votes_chosen": None, "votes": None,
    "soft_label": None, "objectives": None, "weight": 1.0, "category": None, "source": "preferences", "row": 7,
}  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        {"chosen": "\n\nHuman: hi\n\nAssistant: good", "rejected": "\n\nHuman: hi\n\nAssistant: bad"},
        {"prompt": "hi", "chosen": "good", "rejected": "bad"},
        {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": "good", "rejected": "bad"},
        {"chosen": [USER, says("good")], "rejected": [USER, says("bad")]},
        {"prompt": [USER], "chosen": [says("good")], "rejected": [says("bad")]},
        {"prompt": "hi", "chosen": [USER, says("good")], "rejected": [USER, says("bad")]},
        {"prompt": "hi", "a": "bad", "b": "good", "label": "a2"},
    ],
)
def test_every_format_gives_the_same_pair(data):
    row = read(data)
    assert row.problems == []
    assert row.item == PAIR


def test_a_prompt_beside_lists_that_continue_it_comes_first():
    prompt = [{"role": "system", "content": "Be kind."}]
    item = read({"prompt": prompt, "chosen": [USER, says("good")], "rejected": [USER, says("bad")]}).item
    assert item["prompt"] == [*prompt, USER]


@pytest.mark.parametrize(
    ("votes", "counted"),
    [
        (["a1", "a2", "a2", "equal"], (1, 2, 1)),
        ([{"label": "b", "annotator": "w1"}, {"label": "a"}, {"label": "b"}], (1, 2, 0)),
        ({"a": 1, "b": 3, "equal": 2}, (1, 3, 2)),
    ],
)
def test_votes_are_counted_and_the_most_frequent_answer_decides(votes, counted):
    row = read({"prompt": "hi", "a": "bad", "b": "good", "votes": votes})
    assert row.ballot == counted and row.first_wins is False
    assert (row.item["chosen"], row.item["votes_chosen"], row.item["votes"]) == ("good", counted[1], sum(counted))


def test_vote_counts_in_columns_may_be_text_as_csv_has_them():
    row = read({"prompt": "hi", "a": "good", "b": "bad", "votes_a": "3", "votes_b": "2"})
    assert row.ballot == (3, 2, 0) and row.first_wins is True and row.item["chosen"] == "good"


@pytest.mark.parametrize("votes", [["a", "b"], ["equal"], ["a", "equal"], ["a", "b", "equal", "equal"]])
def test_votes_without_a_single_winner_are_a_tie_and_still_counted(votes):
    row = read({"prompt": "hi", "a": "x", "b": "y", "votes": votes})
    assert row.problems == [Problem("decided", "tie")]
    assert sum(row.ballot) == len(votes)


def test_a_stance_is_part_of_the_prompt():
    item = read({"prompt": "hi", "stance": "yes", "a": "x", "b": "y", "votes": ["a"]}).item
    assert item["prompt"] == [{"role": "user", "content": "hi\nyes"}]


def test_the_counts_beside_a_chosen_response_are_kept():
    row = read({"prompt": "hi", "chosen": "x", "rejected": "y", "votes_chosen": 3, "votes": 5, "category": "c"})
    assert (row.item["votes_chosen"], row.item["votes"], row.item["category"]) == (3, 5, "c")
    assert row.ballot == (3, 2, 0) and row.first_wins is None


@pytest.mark.parametrize(
    ("chosen", "votes", "reason"),
    [
        (6, 5, ("votes_valid", "votes_chosen is 6 of 5 votes")),
        (0, 0, ("votes_valid", "votes_chosen is 0 of 0 votes")),
        (1, 5, ("votes_valid", "the chosen response has only 1 of 5 votes")),
        (2, 4, ("decided", "tie")),
        (-1, 5, ("votes_valid", "`votes_chosen` is -1, expected a count of votes")),
        (True, 5, ("votes_valid", "`votes_chosen` is True, expected a count of votes")),
        (None, 5, ("votes_valid", "`votes_chosen` is None, expected a count of votes")),
    ],
)
def test_impossible_counts_are_told_from_ties(chosen, votes, reason):
    data = {"prompt": "hi", "chosen": "x", "rejected": "y", "votes_chosen": chosen, "votes": votes}
    assert reasons(data) == [reason]


def test_two_scores_make_a_margin():
    assert (
        read({"prompt": "hi", "chosen": "x", "rejected": "y", "score_chosen": 8, "score_rejected": "5.5"}).item[
            "margin"
        ]
        == 2.5
    )


GOOD = {"prompt": "hi", "chosen": "x", "rejected": "y"}
UNKNOWN_VOTE = (
    "vote 'c', expected a, b (also model_a, first and the like), tie or both_bad; say what others mean with "
    "data.label_values, as {'1': a, '2': b}"
)
VOTED = {"prompt": "hi", "a": "x", "b": "y"}
TURNS = "\n\nHuman: {}\n\nAssistant: {}"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (GOOD | {"rejected": None}, ("fields_present", "`rejected` is missing")),
        (GOOD | {"chosen": 5}, ("fields_present", "`chosen` is a number, expected text")),
        (GOOD | {"chosen": " \n"}, ("texts_filled", "empty response: chosen")),
        (GOOD | {"chosen": "\u200b\ufeff \u202e"}, ("texts_filled", "empty response: chosen")),
        (GOOD | {"chosen": "\u2800\u3164"}, ("texts_filled", "empty response: chosen")),
        (GOOD | {"chosen": "<|reserved_special_token_0|>"}, ("no_markers", "'<|reserved_special_token_0|>' in chosen")),
        (GOOD | {"rejected": "x "}, ("responses_differ", "identical responses")),
        (GOOD | {"prompt": " "}, ("texts_filled", "empty prompt turn")),
        (GOOD | {"chosen": "a\x00b"}, ("text_clean", "control character '\\x00' in chosen")),
        (GOOD | {"chosen": "x\udce9"}, ("text_clean", "byte that is not UTF-8, shown as '\\udce9' in chosen")),
        (GOOD | {"prompt": "a\ud800"}, ("text_clean", "control character '\\ud800' in prompt turn 1")),
        (GOOD | {"margin": "much"}, ("fields_present", "`margin` is 'much', expected a finite number")),
        (GOOD | {"margin": 10**400}, ("fields_present", f"`margin` is 1{'0' * 56}..., expected a finite number")),
        (GOOD | {"margin": 1e38}, ("fields_present", "`margin` is 1e+38, expected a number from -1e9 to 1e9")),
        (
            GOOD | {"votes": 2**31, "votes_chosen": 2**31},
            ("votes_valid", "`votes_chosen` is 2147483648, expected at most 1000000 votes"),
        ),
        (VOTED | {"votes": {"a": 10**400}},
         ("votes_valid", f"`votes.a` is 1{'0' * 56}..., expected at most 1000000 votes")),
        (VOTED | {"votes_a": "9" * 5000},
         ("votes_valid", f"`votes_a` is '{'9' * 56}..., expected at most 1000000 votes")),
        ({"chosen": TURNS.format("a", "x"), "rejected": TURNS.format("b", "y")}, ("prompts_agree", "prompts differ")),
        ({"chosen": [USER, says("x")], "rejected": [says("y")]}, ("prompts_agree", "prompts differ")),
        ({"chosen": TURNS.format("a", "x"), "rejected": "\n\nHuman: a"}, ("turns_valid", "no assistant turn")),
        ({"chosen": [says("x")], "rejected": [says("y")]}, ("turns_valid", "no turn before the response")),
        (VOTED | {"votes": ["c"]}, ("votes_valid", UNKNOWN_VOTE)),
        (VOTED | {"votes": []}, ("votes_valid", "`votes` is a list without votes")),
        (VOTED | {"votes_a": 0, "votes_b": 0}, ("votes_valid", "no votes")),
    ],
)  # fmt: skip
def test_each_fault_of_a_row_is_named(data, reason):
    row = read(data)
    assert [tuple(p) for p in row.problems] == [reason]
    assert row.data == data


@pytest.mark.parametrize(("name", "ours"), [("rankings", "ranks"), ("place_of", "ranks"), ("quality", "scores")])
def test_numbers_without_a_name_are_mapped_by_what_they_say(name, ours):
    (row,) = parse_pairs(RawRow(1, {"prompt": "q", "responses": ["x", "y"], name: [1, 2]}), "ranking", "s", 99)
    assert f"--set data.columns.{ours}={name}" in row.problems[0].text


def test_a_rank_of_400_digits_is_a_bad_row():
    (row,) = parse_pairs(
        RawRow(1, {"prompt": "hi", "responses": ["x", "y"], "ranks": [1, 10**400]}), "ranking", "preferences", 99
    )
    assert [problem.check for problem in row.problems] == ["fields_present"]


@pytest.mark.parametrize(
    ("own", "source"),
    [("forum ", "forum"), (None, "preferences"), (" ", "preferences"), (7, "preferences"), ("a\udcf6", "preferences")],
)
def test_a_pairs_source_is_what_its_row_says_else_the_input(own, source):
    assert read(GOOD | {"source": own}).item["source"] == source
    assert read(VOTED | {"votes": ["a"], "source": own}).item["source"] == source


def test_tabs_and_line_breaks_are_clean():
    assert reasons(GOOD | {"chosen": "👩\u200d👩\u200d👧 नमस्\u200dते"}) == [], "joiners within a text are text"
    assert reasons(GOOD | {"chosen": "a\tb\r\nc é 你 🙂"}) == []


def test_the_longest_row_is_measured_with_its_longer_response():
    assert reasons(GOOD | {"rejected": "y" * 8}, most=10) == []
    assert reasons(GOOD | {"rejected": "y" * 9}, most=10)[0][0] == "length_within"


def test_a_file_whose_every_pair_lacks_rejected_is_refused_by_field():
    rows = [RawRow(i, {"prompt": "hi", "chosen": "x"}) for i in range(1, 4)]
    with pytest.raises(UserError, match=r"x\.jsonl: every pair lacks `rejected`.*in 3 rows are chosen, prompt"):
        detect(rows, "x.jsonl")


@pytest.mark.parametrize("row", [{"prompt": "q", "completion": "x", "label": True}, {"messages": [], "kto_tag": False}])
def test_kto_rows_are_refused_as_pairs_with_the_option_that_takes_them(row):
    with pytest.raises(UserError, match=r"single responses with a label \(KTO\).*data.demonstrations"):
        detect([RawRow(1, row)], "x.jsonl")


def test_an_annotators_second_vote_in_a_row_of_a_pair_does_not_count_and_is_named():
    votes = [
        {"annotator": who, "label": label} for who, label in (("ann", "a"), ("ben", "b"), ("ann", "b"), ("cy", "a"))
    ]
    row = read(VOTED | {"votes": votes})
    assert (row.ballot, row.votes) == (Ballot(2, 1, 0), (("ann", 0), ("ben", 1), ("cy", 0)))
    text = "annotator 'ann' votes twice on this pair; the first vote counts"
    assert row.item is not None and [tuple(problem) for problem in row.problems] == [("votes_once", text)]


@pytest.mark.parametrize(("label", "wins"), [("model_a", True), ("first", True), ("Model_B", False), ("second", False)])
def test_names_that_say_which_response_they_mean_need_no_mapping_and_numbers_do(label, wins):
    assert read(VOTED | {"votes": [label]}).first_wins is wins
    for number in (0, 1, 2, True, False, "1"):
        (problem,) = read(VOTED | {"votes": [number]}).problems
        assert problem.check == "votes_valid" and "data.label_values" in problem.text


DIRTY = ["Assistant: x", "\ufeff\u200fHuman: x", " Human: x", "x</s>", "<s>x", "x \ufffd y"]


@pytest.mark.parametrize("text", DIRTY)
def test_role_labels_at_a_texts_start_llamas_tokens_and_broken_encodings_are_dirt(text):
    (problem,) = read({"prompt": "q", "chosen": text, "rejected": "y"}).problems
    assert problem.check == ("text_clean" if "\ufffd" in text else "no_markers")
    assert read({"prompt": "q", "chosen": "The Human: x <strong>", "rejected": "y"}).problems == []


def test_unknown_fields_are_refused_with_those_found_and_those_expected():
    with pytest.raises(
        UserError, match=r"are not preference pairs.*in 1 row are better, worse.*`chosen`.*data\.columns"
    ):
        detect([RawRow(1, {"better": "x", "worse": "y"})], "x.jsonl")


def test_a_file_of_which_no_row_can_be_read_is_refused_for_that_and_not_for_its_fields():
    rows = [RawRow(n, {"raw": "a;b"}, Problem("readable", "2 cells, the header has 3")) for n in (2, 3)]
    for found in (detect, demonstrations.detect):
        with pytest.raises(UserError, match=r"x\.csv: none of its first 2 rows can be read\. Row 2: 2 cells"):
            found(rows, "x.csv")


def test_the_format_is_that_of_most_rows_and_the_others_are_bad_rows():
    odd, most = (
        RawRow(1, {"chosen": [USER, says("x")], "rejected": [USER, says("y")]}),
        [RawRow(i, GOOD) for i in (2, 3)],
    )
    assert detect([odd, *most], "x.jsonl") == "strings"
    assert parse_pair(odd, "strings", "preferences", LONG).problems[0].check == "fields_present"


def test_an_unreadable_row_keeps_its_problem():
    problem = Problem("readable", "bad JSON")
    row = parse_pair(RawRow(3, {"raw": "{"}, problem), "strings", "preferences", LONG)
    assert row.problems == [problem] and row.data == {"raw": "{"} and row.item is None
