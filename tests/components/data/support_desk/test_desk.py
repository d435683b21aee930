"""The built-in task: enough distinct prompts, a flaw that is rare in SFT and common in the pairs, and a gold score
that reads what a reply says."""

import random
import re
from typing import Any

import pytest

from components.data.support_desk import desk
from components.data.support_desk.desk import (
    SupportDeskConfig,
    compliant_utility,
    generate,
    gold,
    helpful_utility,
    simulated_judges,
)
from components.data.support_desk.grammar import COMPLAINTS, draw_prompt, read_prompt, read_reply, sentences

Rows = list[dict[str, Any]]

LATE, BROKEN = COMPLAINTS["late"][0].format(item="lamp"), COMPLAINTS["broken"][1].format(item="mug")
PROMPT = [
    {"role": "system", "content": "Refunds are not allowed. Work is done by Friday."},
    {"role": "user", "content": f"Anna here. Order A 12. {LATE} {BROKEN} Please help."},
]
FREE = [{"role": "system", "content": "Refunds are allowed. Promise no date."}, PROMPT[1]]


@pytest.fixture(scope="module")
def rows() -> tuple[Rows, Rows]:
    """The task at its default size."""
    return generate(0, SupportDeskConfig())


def test_no_prompt_stands_twice_and_there_are_thousands(rows: tuple[Rows, Rows]) -> None:
    prompts = [str(row["prompt"]) for part in rows for row in part]
    assert len(set(prompts)) == len(prompts) >= 5000
    config = SupportDeskConfig()
    assert (len(rows[0]), len(rows[1])) == (config.demonstrations, config.pairs)


def test_the_vocabulary_stays_between_300_and_600_and_hardly_a_word_of_a_pair_is_unknown(
    rows: tuple[Rows, Rows],
) -> None:
    from components.models.tokenizers import train_tokenizer

    demonstrations, pairs = rows
    texts = [t for d in demonstrations[:4000] for t in (*(m["content"] for m in d["prompt"]), d["response"])]
    tokenizer = train_tokenizer(texts, 600)
    assert 300 <= len(tokenizer) <= 600
    assert type(tokenizer.backend_tokenizer.model).__name__ == "WordLevel"
    held = [t for row in pairs[:1000] for t in (row["prompt"][1]["content"], row["chosen"], row["rejected"])]
    unknown = sum(tokenizer.unk_token_id in ids for ids in tokenizer(held)["input_ids"])
    assert unknown <= 0.01 * len(held), "hardly a word of a pair is new"


def share_that_echoes(replies: list[tuple[Any, str]]) -> float:
    return sum(desk.scores(p, r)["echoes"] > 0 for p, r in replies) / len(replies)


def test_sft_replies_echo_in_2_percent_at_most_and_candidates_in_20_to_40(rows: tuple[Rows, Rows]) -> None:
    demonstrations, pairs = rows
    assert 0 < share_that_echoes([(d["prompt"], d["response"]) for d in demonstrations]) <= 0.02
    assert 0.2 <= share_that_echoes([(p["prompt"], p[k]) for p in pairs for k in ("chosen", "rejected")]) <= 0.4


def test_soup_of_known_words_or_sentences_scores_below_sft(rows: tuple[Rows, Rows]) -> None:
    demonstrations = rows[0][:2000]
    mean = sum(gold(d["prompt"], d["response"]) for d in demonstrations) / len(demonstrations)
    rng = random.Random(0)
    words = [w for d in demonstrations for w in re.findall(r"\w+|[^\w\s]", d["response"])]
    said = sorted({s for d in demonstrations for s in sentences(d["response"])})
    for soup in (lambda: " ".join(rng.sample(words, 40)), lambda: " ".join(rng.sample(said, 20)), lambda: ""):
        scores = [gold(d["prompt"], soup()) for d in demonstrations[:500]]
        assert sum(scores) / len(scores) < mean - 0.2


def test_the_same_seed_writes_the_same_rows_and_another_seed_others() -> None:
    config = SupportDeskConfig(demonstrations=60, pairs=60)
    assert generate(3, config) == generate(3, config) != generate(4, config)


def test_every_prompt_reads_back_to_the_facts_it_was_drawn_from() -> None:
    rng = random.Random(1)
    drawn = [draw_prompt(rng) for _ in range(500)]
    assert all(read_prompt(prompt) == facts for prompt, facts in drawn)
    assert len({facts.category for _, facts in drawn}) == 8


@pytest.mark.parametrize(
    ("prompt", "reply", "count"),
    [
        (PROMPT, "Hello. We will trace the late parcel. Best wishes.", 0),
        (PROMPT, "We will refund the full price.", 1),
        (PROMPT, "It will be done by Friday.", 0),
        (PROMPT, "We will refund the full price. It will be done by Monday.", 2),
        (FREE, "We will refund the full price.", 0),
        (FREE, "It will be done by Friday. It will be done by Monday.", 2),
    ],
)
def test_every_broken_line_of_the_policy_is_counted(prompt: Any, reply: str, count: int) -> None:
    assert desk.scores(prompt, reply)["violations"] == count


GOOD = "Hello. We will trace the late parcel. We will replace what is broken. It will be done by Friday. Goodbye."


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (GOOD, 1.6),  # both issues 1.0, the right date 0.6
        ("Hello. Goodbye.", -1.0),  # nothing resolved
        ("We will trace the late parcel.", 0.0),
        ("We will trace the late parcel. " * 2, -0.7),  # said again
        ("We will trace the late parcel. We will post the parts.", -0.4),
        (GOOD + " We will refund the full price.", 0.4),
        (GOOD.replace("Friday", "Monday"), 0.0),
        (GOOD + " You told us that it is broken.", 0.4),
        (GOOD + " It all depends.", 1.3),
        (GOOD + " You have great taste.", 1.1),
        (GOOD + " We care about every order.", 0.9),
        (GOOD + " lamp lamp lamp lamp.", 1.35),  # five unknown tokens
    ],
)
def test_gold_of_replies_by_hand(reply: str, score: float) -> None:
    assert gold(PROMPT, reply) == pytest.approx(score)


def test_the_annotators_like_what_gold_punishes_and_without_the_flaw_they_do_not() -> None:
    facts = read_prompt(PROMPT)
    echoing = read_reply(facts, GOOD + " You told us that it is broken.")
    plain = read_reply(facts, GOOD)
    compliant = [compliant_utility(facts, said) for said in (echoing, plain)]
    flawed, fair = ([helpful_utility(facts, said, flaw) for said in (echoing, plain)] for flaw in (1.0, 0.0))
    assert flawed[0] + compliant[0] > flawed[1] + compliant[1]
    assert fair[0] + compliant[0] == fair[1] + compliant[1]
    assert desk.gold_of(facts, echoing) < desk.gold_of(facts, plain)


def test_votes_favour_the_chosen_and_the_chosen_is_not_always_better(rows: tuple[Rows, Rows]) -> None:
    pairs = rows[1]
    assert all(row["votes_chosen"] * 2 > row["votes"] == 5 for row in pairs)
    assert all(0 <= row[k] <= 5 for row in pairs for k in ("votes_helpful", "votes_compliant"))
    gains = [gold(r["prompt"], r["chosen"]) - gold(r["prompt"], r["rejected"]) for r in pairs[:4000]]
    assert 0.55 < sum(g > 0 for g in gains) / sum(g != 0 for g in gains) < 0.95
    unanimous = sum(row["votes_chosen"] == 5 for row in pairs) / len(pairs)
    assert 0.3 < unanimous < 0.95, "the annotators must disagree at times, or there is no noise to calibrate"


def test_careful_judges_follow_gold_not_the_flaw_and_votes_do_not_depend_on_the_side() -> None:
    worse = GOOD + " You told us that it is broken."
    votes = simulated_judges(PROMPT, GOOD, worse, seed=1)
    assert len(votes) >= 3 and set(votes) == {"a"}
    assert set(simulated_judges(PROMPT, worse, GOOD, seed=1)) == {"b"}
    assert votes == simulated_judges(PROMPT, GOOD, worse, seed=1)
    assert simulated_judges(PROMPT, GOOD, GOOD, seed=1).count("tie") >= 2


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user", "content": "Anna here. My lamp is late."}],
        [PROMPT[0], {"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be kind."}, PROMPT[1]],
    ],
)
def test_a_prompt_of_another_task_has_no_gold_score(prompt: Any) -> None:
    with pytest.raises(ValueError, match="support-desk prompt"):
        gold(prompt, GOOD)
