"""Clean data raise no check; each fault planted in them is found by its own check, at its own row, and by no other."""

import json
import random
import re

import pytest

from components.base.errors import UserError
from components.data.checks_config import ChecksConfig, RowChecks, SetChecks
from components.data.config import SplitConfig
from components.data.splits import prompt_key, split_of
from components.models.tokenizers import train_tokenizer
from data_contracts.check import check

NOUNS = (
    "river garden window letter market bridge winter summer forest kitchen teacher doctor village station ticket "
    "basket mirror pillow candle ladder button pocket blanket hammer island mountain valley castle harbour engine"
).split()
VERBS = "describe explain compare repair paint clean measure carry lift visit remember forget borrow sell build".split()
WORDS = [*NOUNS, *VERBS, "the", "and", "with", "from", "under", "over", "about", "before", "after", "without"]


def sentence(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


def clean(n=600, seed=0):
    """Pairs of distinct prompts; who wins, who stands first and how long a response is are independent."""
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        prompt = f"Please {rng.choice(VERBS)} the {rng.choice(NOUNS)} number {i}: {sentence(rng, 12)}"
        a, b = sentence(rng, rng.randint(6, 20)), sentence(rng, rng.randint(6, 20))
        wins = rng.choice("ab")
        others = {"a": "b", "b": "a"}[wins]
        rows.append({"prompt": prompt, "a": a, "b": b, "votes": [wins, wins, wins, rng.choice([wins, others])]})
    return rows


FEW = {
    name: {"severity": "warn", "threshold": rows} for name, rows in (("enough_pairs", 200), ("enough_test_pairs", 80))
}
"""So that 600 pairs are enough, and each test takes half of the time."""


@pytest.fixture
def examined(tmp_path, job):
    """The report of `tether data check` on rows (dicts, or lines as they are)."""

    def examined(rows, prompts=None, base=None, **data):
        inputs = {"preferences": tmp_path / "pairs.jsonl"} | ({} if base is None else {"base": base})
        if prompts is not None:
            inputs["prompts"] = tmp_path / "prompts.jsonl"
            inputs["prompts"].write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        inputs["preferences"].write_text("\n".join(lines) + "\n")
        given = {name: str(path) for name, path in inputs.items() if name != "base"}
        data.setdefault("checks", FEW)
        return check(job(**given, **data), inputs, tmp_path / "scratch", None, lambda *read: None)

    return examined


def fired(report):
    """Checks that found rows or that failed, with the rows they name."""
    return {c["name"]: c["row_numbers"] for c in report["checks"] if c["rows"] or not c["passed"]}


def messages(*said):
    return [{"role": role, "content": text} for role, text in said]


def longest(words):
    return " ".join(["river"] * words)


def split(text):
    return split_of(prompt_key([{"role": "user", "content": text}]), SplitConfig())


def votes(row, *labels):
    return row | {"votes": list(labels)}


# Each takes a clean row and gives the one that is planted in its place.
FAULTS = {
    "readable": lambda row, rows: '{"prompt": ',
    "fields_present": lambda row, rows: row | {"b": 5},
    "roles_alternate": lambda row, rows: row | {"prompt": messages(("user", row["prompt"]), ("user", "And so?"))},
    "texts_filled": lambda row, rows: row | {"a": " \n"},
    "responses_differ": lambda row, rows: row | {"a": row["b"]},
    "text_clean": lambda row, rows: row | {"a": row["a"] + "\x07"},
    "votes_valid": lambda row, rows: votes(row, "a", "c"),
    "no_markers": lambda row, rows: row | {"b": row["b"] + " <|im_start|> " + row["a"]},
    "no_placeholder": lambda row, rows: row | {"a": "#NAME?"},
    "differ_truncated": lambda row, rows: row | {"a": longest(80), "b": longest(80) + " garden"},
    "length_within": lambda row, rows: row | {"a": row["a"] + " x" * 10_000},
    "unique": lambda row, rows: rows[0],
    "decided": lambda row, rows: votes(row, "a", "b"),
    "near_unique": lambda row, rows: rows[2] | {"prompt": rows[2]["prompt"].replace(" ", "  ", 3)},
    "prompt_fits": lambda row, rows: row | {"prompt": row["prompt"] + sentence(random.Random(5), 100)},
    "response_fits": lambda row, rows: row | {"a": sentence(random.Random(6), 100)},
}
ALSO = {"differ_truncated": {"response_fits"}}
"""Checks that the same fault rightly raises too."""


def test_clean_pairs_raise_no_check(examined):
    report = examined(clean())
    assert fired(report) == {} and report["passed"]
    assert (report["rows"], report["pairs"], report["quarantined"]) == (600, 600, 0)
    assert {"no_leak", "length_drift", "language_drift", "label_position"} <= {c["name"] for c in report["checks"]}


def test_each_planted_row_is_named_by_its_own_check_alone(examined):
    rows = clean()
    planted = {name: 10 * place for place, name in enumerate(FAULTS, 1)}
    for name, at in planted.items():
        rows[at] = FAULTS[name](rows[at], rows)
    found = fired(examined(rows))
    expected = {name: sorted({at + 1, *(planted[n] + 1 for n in FAULTS if name in ALSO.get(n, ()))})
                for name, at in planted.items()}  # fmt: skip
    assert found == expected


def test_a_pair_judged_both_ways_is_named_in_both_places(examined):
    rows = clean()
    rows[50] = rows[3] | {"votes": ["b" if vote == "a" else "a" for vote in rows[3]["votes"]]}
    assert fired(examined(rows)) == {"consistent": [4, 51]}


def test_transcripts_whose_prompts_differ_or_end_with_a_question_are_named(examined):
    def transcript(prompt, response):
        return f"\n\nHuman: {prompt}\n\nAssistant: {response}"

    rows = [{"chosen": transcript(r["prompt"], r["a"]), "rejected": transcript(r["prompt"], r["b"])} for r in clean()]
    rows[7]["rejected"] = transcript("Another question, is it not?", "So it is.")
    rows[9]["chosen"] += "\n\nHuman: thanks"
    assert fired(examined(rows)) == {"prompts_agree": [8], "turns_valid": [10]}


def whole(rows, **changes):
    return [row | {name: change(row) for name, change in changes.items()} for row in rows]


def test_a_longer_response_that_always_wins_is_found_and_its_interval_given(examined):
    rows = whole(clean(), votes=lambda r: ["a" if len(r["a"].split()) >= len(r["b"].split()) else "b"] * 3)
    report = examined(rows)
    assert fired(report) == {"length_preference": []} and report["longer_wins"] == 1
    found = next(c for c in report["checks"] if c["name"] == "length_preference")
    assert found["value"] == 1 and found["interval"][0] > 0.98


def test_a_response_shown_first_that_always_wins_is_found(examined):
    assert fired(examined(whole(clean(), votes=lambda r: ["a", "a"]))) == {"label_position": []}


def test_too_few_pairs_are_found(examined):
    assert set(fired(examined(clean(120), checks={}))) == {"enough_pairs", "enough_test_pairs"}
    report = examined(clean(120), split={"train": 0.99, "calibration": 0.005, "test": 0.005})
    assert "every_split" in fired(report) and not report["passed"]


def test_a_test_prompt_that_nearly_is_a_training_prompt_is_named(examined):
    rows = clean()
    train = next(r["prompt"] for r in rows if split(r["prompt"]) == "train")
    at = next(i for i, r in enumerate(rows) if split(r["prompt"]) == "test")
    rows[at]["prompt"] = next(
        text for n in range(100) if split(text := train.replace(" ", "  ", 1) + "!" * n) == "test"
    )
    assert fired(examined(rows)) == {"no_near_duplicate": [at + 1]}


def test_a_held_out_prompt_is_seen_to_be_near_a_training_prompt_though_nearer_to_another_held_out_one(examined):
    """Of each three prompts that differ by a word, one is for training; each held-out one is near both others."""
    rows, near, rng = clean(900), [], random.Random(0)
    for at in range(0, 900, 3):
        text = sentence(rng, 60).split()
        turned = [" ".join([*text[:-1], f"{word}{at}."]) for word in NOUNS]
        found = {s: [t for t in turned if split(t) == s]
                 for s in ("train", "calibration", "test")}  # fmt: skip
        if not (found["train"] and found["calibration"] and found["test"]):
            continue
        for place, name in enumerate(("train", "calibration", "test")):
            rows[at + place]["prompt"] = found[name][0]
        near += [at + 2, at + 3]
    report = examined(rows)
    check = next(c for c in report["checks"] if c["name"] == "no_near_duplicate")
    assert len(near) > 400 and len(set(near) - set(check["row_numbers"])) < 0.05 * len(near)
    held_out = sum(split(r["prompt"]) != "train" for r in rows)
    assert check["value"] == pytest.approx(check["rows"] / held_out), "a share of held-out pairs"


def ranked(n=400, seed=0):
    """Rankings of three short responses to a prompt of 50 words, so that the pairs of each are near-duplicates."""
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        responses = [f"The {noun} and {sentence(rng, 1)}" for noun in rng.sample(NOUNS, 3)]
        rows.append({"prompt": f"Number {i}: {sentence(rng, 50)}", "responses": responses})
    return rows


def test_clean_rankings_raise_no_check_and_are_counted_as_rows(examined):
    report = examined(ranked())
    assert fired(report) == {} and (report["rows"], report["pairs"], report["quarantined"]) == (400, 1200, 0)


def test_a_share_of_rankings_is_a_share_of_rows_whatever_their_pairs(examined):
    broken = [row | {"responses": "one"} for row in ranked(20, seed=1)]
    large = [{"prompt": f"Question {i}", "responses": [f"{place} of {i}" for place in "abcdefghi"]} for i in range(20)]
    report = examined([*large, *broken])
    check = next(c for c in report["checks"] if c["name"] == "fields_present")
    assert (check["value"], check["rows"], check["passed"], report["quarantined"]) == (0.5, 20, False, 20)
    report = examined([row | {"responses": [f"{longest(80)} {place}" for place in "abcd"]} for row in large])
    assert re.search(r"in 20 rows.*the responses agree.*\(20 rows, the first is row 1\)", report["reasons"][0])


def test_a_ranking_that_repeats_another_or_itself_is_one_row(examined):
    rows = ranked()
    rows[7] |= {"prompt": rows[2]["prompt"].replace(" ", "  ", 3), "responses": rows[2]["responses"]}
    rows[11]["responses"][2] = rows[11]["responses"][1]
    report = examined(rows)
    assert fired(report) == {"near_unique": [8], "responses_differ": [12], "unique": [12]}
    assert {c["name"]: c["rows"] for c in report["checks"] if c["rows"]} == dict.fromkeys(fired(report), 1)
    assert report["quarantined"] == 1 and report["pairs"] == 1198


def test_clean_demonstrations_and_prompts_alone_raise_no_check(tmp_path, job):
    for name, field in (("demonstrations", "response"), ("prompts", "category")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": r["prompt"], field: r["a"]}) + "\n" for r in clean()))
        report = check(job(**{name: str(path)}), {name: path}, tmp_path / "scratch", None, lambda *read: None)
        assert fired(report) == {} and report["passed"] and report["rows"] == 600, name


GERMAN = "der Fluss fließt langsam durch das alte Tal und die Kinder spielen am Ufer mit ihren Freunden".split()


def test_a_held_out_split_in_another_language_or_of_another_length_is_found(examined):
    def held_out(row):
        return split(row["prompt"]) != "train"

    def german(row, side):
        rng = random.Random(row[side])
        return " ".join(rng.choice(GERMAN) for _ in row[side].split()) if held_out(row) else row[side]

    found = fired(examined(whole(clean(), a=lambda r: german(r, "a"), b=lambda r: german(r, "b"))))
    # The tokenizer, made from English, knows none of the words: responses of as many become one, and are kept out.
    assert {"language_drift", "known_tokens"} <= set(found)
    longer = whole(clean(), a=lambda r: r["a"] + (" " + r["a"][:-1] if held_out(r) else ""))
    assert set(fired(examined(longer))) == {"length_drift"}


def test_prompts_for_ppo_of_another_kind_are_found_and_the_same_kind_is_not(examined):
    rows = clean()
    same = [row["prompt"] for row in clean(seed=1)]
    assert fired(examined(rows, prompts=same)) == {}
    rng = random.Random(3)
    other = [" ".join(rng.choice(GERMAN) for _ in range(14)) + f" {i}" for i in range(300)]
    assert fired(examined(rows, prompts=other)) == {"prompts_alike": []}


def test_a_severity_and_a_threshold_of_the_config_decide_what_becomes_of_a_finding(examined):
    rows = clean()
    rows[4]["b"] += " <|im_end|>"
    strict = examined(rows, checks={"no_markers": {"severity": "error", "threshold": 0}})
    assert not strict["passed"] and strict["quarantined"] == 1
    lenient = examined(rows, checks={"no_markers": {"severity": "warn", "threshold": 0.5}})
    assert lenient["passed"] and lenient["quarantined"] == 0 and lenient["pairs"] == 600


THINKS_ALOUD = (  # as templates do that leave reasoning out of what is learned from, or know no system message
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def pretrained(tmp_path):
    """The folder of a tokenizer with this chat template, and with a special token that it has no use for."""

    def pretrained(template):
        tokenizer = train_tokenizer([f"{r['prompt']} {r['a']} {r['b']}" for r in clean(300)], 2000)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<file_sep>"]}, replace_extra_special_tokens=False)
        tokenizer.extra_special_tokens = []
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return pretrained


def test_what_the_runs_own_template_or_tokenizer_misreads_is_named(examined, pretrained, tmp_path):
    rows = clean()
    rows[5]["prompt"] = messages(("system", "Be brief."), ("user", rows[5]["prompt"]))
    rows[9]["b"] = "the river </think> " + rows[9]["b"]
    rows[13]["a"] += " <file_sep>"
    found = fired(examined(rows, base=pretrained(THINKS_ALOUD)))
    assert {name: found.get(name) for name in ("template_takes", "template_agrees", "no_markers")} == {
        "template_takes": [6], "template_agrees": [10], "no_markers": [14],
    }  # fmt: skip
    quarantined = (tmp_path / "scratch" / "quarantine.jsonl").read_text()
    assert "the chat template refuses the prompt: System role not supported" in quarantined


def test_a_template_that_reads_no_row_right_fails_the_contract_with_the_reason(examined, pretrained):
    report = examined(clean(), base=pretrained("{% for m in messages %}{{ m['content'] }}{% endfor %}"))
    reason = r"no valid.*600 rows.*doesn't render.*600 rows.*row 1\)\. Give a chat"
    assert not report["passed"] and re.search(reason, report["reasons"][0])


@pytest.mark.parametrize("mistake", ["{% for m in", "{{ messages[0]['content'] + 1 }}"])
def test_a_template_that_cannot_work_is_the_users_error_by_folder(examined, pretrained, mistake):
    with pytest.raises(UserError, match=r"chat template of the tokenizer in .*base can't be used"):
        examined(clean(), base=pretrained(mistake))


def test_a_template_that_fails_in_any_way_on_a_prompt_refuses_that_row_alone(examined, pretrained):
    rows = clean()
    rows[5]["prompt"] = "%d " + rows[5]["prompt"]
    template = THINKS_ALOUD.replace(
        "m['content'].split", "(m['content'] % () if '%' in m['content'] else m['content']).split"
    )
    report = examined(rows, base=pretrained(template))
    assert fired(report)["template_takes"] == [6] and report["quarantined"] == 1


def test_every_check_of_rows_is_planted_somewhere_here():
    elsewhere = {"consistent", "prompts_agree", "turns_valid", "template_takes", "template_agrees", "desirable",
                 "votes_once", "uncontaminated", "reference_apart"}  # fmt: skip
    assert set(FAULTS) | elsewhere == set(RowChecks.model_fields)


def test_a_new_check_of_the_whole_has_to_be_planted_here():
    """All but the guard of our own splitting, which no file can make fail."""
    planted = {
        "every_split", "enough_pairs", "enough_test_pairs", "no_near_duplicate", "length_preference", "label_position",
        "length_drift", "language_drift", "prompts_alike", "known_tokens", "deployment_length", "deployment_language",
        "deployment_category", "deployment_words", "reference_length", "reference_language", "reference_category",
        "reference_words", "reference_preference",
    }  # fmt: skip
    assert planted | {"no_leak"} == set(SetChecks.model_fields)


def test_a_check_whose_rows_cannot_be_used_cannot_be_let_through():
    with pytest.raises(ValueError, match="texts_filled"):
        ChecksConfig.model_validate({"texts_filled": {"severity": "warn", "threshold": 1}})
