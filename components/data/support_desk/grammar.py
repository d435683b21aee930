"""The sentences of the built-in task: a support desk's prompts, and the slots of its replies.

Every prompt and reply is a sequence of known sentences, so its facts can be parsed exactly from the text and need not
be stored. A reply fills slots (remedies, a refund, a date, ...), each drawn independently from a `Style`, so that the
distribution over replies can be enumerated.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

Message = Mapping[str, str]

ITEMS = (
    "kettle lamp chair desk mirror clock radio camera phone tablet keyboard mouse printer monitor speaker headset "
    "charger battery toaster blender oven heater fan vacuum iron mixer grill pan pot knife plate bowl mug bottle rug "
    "curtain pillow blanket mattress sofa shelf drawer bicycle helmet tent backpack jacket scarf boots gloves watch "
    "ring necklace puzzle guitar piano drum novel atlas globe"
).split()
NAMES = (
    "Anna Ben Carla David Elena Farid Grace Hugo Ines Jonas Karin Liam Mona Nadia Oscar Paula Quentin Rosa Samir Tara "
    "Ugo Vera Walter Xenia Yusuf Zoe Amir Bruno Chloe Dora Erik Fiona Goran Hanna Ivan Julia Kofi Lena Marco Nora"
).split()
DAYS = "Monday Wednesday Friday".split()
LETTERS = "A B C D E F G H K L M N P R S T".split()

COMPLAINTS: dict[str, tuple[str, ...]] = {
    "late": ("My {item} is late.", "The {item} is still late.", "Why is my {item} so late?"),
    "broken": ("My {item} is broken.", "The {item} arrived broken.", "There is a broken {item}."),
    "unwanted": ("I will return my {item}.", "I want to return the {item}.", "Let me return the {item}."),
    "wrong": ("I got the wrong {item}.", "This is the wrong {item}.", "You sent the wrong {item}."),
    "parts": ("My {item} lacks parts.", "Some parts of my {item} are gone.", "The {item} came without parts."),
}
REMEDIES: dict[str, str] = {
    "late": "We will trace the late parcel.",
    "broken": "We will replace what is broken.",
    "unwanted": "We will collect the return.",
    "wrong": "We will exchange the wrong one.",
    "parts": "We will post the parts.",
}
ECHOES: dict[str, str] = {
    "late": "You told us that it is late.",
    "broken": "You told us that it is broken.",
    "unwanted": "You told us that it is a return.",
    "wrong": "You told us that it is the wrong one.",
    "parts": "You told us that it came without parts.",
}
ISSUES = tuple(COMPLAINTS)
REFUND = "We will refund the full price."
DATE = "It will be done by {day}."
HEDGES = ("We can not be sure.", "This may or may not help.", "It all depends.")
FLATTERY = ("You are a wonderful customer.", "You have great taste.", "You are so kind to write.")
FILLERS = (
    "We care about every order.", "Our team works very hard.", "Good service matters to us.",
    "We read every message with care.", "Many people enjoy our shop.", "We learn something new each week.",
)  # fmt: skip
OPENINGS = ("Hello.", "Thank you for your message.", "We are sorry.")
CLOSINGS = ("Best wishes.", "Your support team.", "Goodbye.")
TONES = ("Please help.", "I am not happy.", "What can you do?", "This is urgent.")


@dataclass(frozen=True)
class Facts:
    """The facts in a prompt: the issues of the complaint, in order, and what the policy allows."""

    issues: tuple[str, ...]
    refunds: bool
    day: str | None

    @property
    def category(self) -> str:
        """Return a prompt's stratum: the number of issues and what the policy allows."""
        refund, date = ("" if allowed else "no-" for allowed in (self.refunds, self.day))
        return f"{len(self.issues)}-issue/{refund}refund/{date}date"


@dataclass(frozen=True)
class Style:
    """How a writer fills a reply's slots; each field is a probability.

    `remedy` and `wrong_remedy` are per issue. `flattery`, `filler` and `echo` are the probabilities of one more such
    sentence (a geometric number, up to the number of known sentences, for `echo` of complaints). `repeat` is that of
    saying a remedy twice.
    """

    remedy: float
    wrong_remedy: float
    refund: float
    right_date: float
    wrong_date: float
    hedge: float
    flattery: float
    filler: float
    echo: float
    repeat: float = 0.0


def draw_prompt(rng: random.Random) -> tuple[list[dict[str, str]], Facts]:
    """Draw a policy (system message) and a complaint about one or two items (user message)."""
    refunds, day = rng.random() < 0.5, rng.choice(DAYS) if rng.random() < 0.5 else None
    issues = rng.sample(ISSUES, 1 if rng.random() < 0.75 else 2)
    complaints = [rng.choice(COMPLAINTS[issue]).format(item=rng.choice(ITEMS)) for issue in issues]
    order = f"Order {rng.choice(LETTERS)} {rng.randrange(10, 100)}."
    date = f"Work is done by {day}." if day else "Promise no date."
    policy = f"Refunds are {'allowed' if refunds else 'not allowed'}. {date}"
    user = " ".join([f"{rng.choice(NAMES)} here.", order, *complaints, rng.choice(TONES)])
    prompt = [{"role": "system", "content": policy}, {"role": "user", "content": user}]
    return prompt, Facts(tuple(issues), refunds, day)


def draw_slots(facts: Facts, style: Style, rng: random.Random) -> list[list[str]]:
    """Draw the sentences of a reply to the prompt of `facts`, slot by slot, by `style`."""

    def leading(sentences: Iterable[str], p: float) -> list[str]:
        """Return the first of `sentences`, each included with probability `p` if the one before it is."""
        return list(takewhile(lambda _: rng.random() < p, sentences))

    slots: list[list[str]] = [[rng.choice(OPENINGS)] if rng.random() < 0.7 else []]
    slots.append(leading((ECHOES[issue] for issue in facts.issues), style.echo))
    for issue in facts.issues:
        u = rng.random()
        if u < style.remedy:
            slots.append([REMEDIES[issue]])
        elif u < style.remedy + style.wrong_remedy:
            slots.append([REMEDIES[rng.choice([i for i in ISSUES if i not in facts.issues])]])
        else:
            slots.append([])
    slots.append([REFUND] if rng.random() < style.refund else [])
    u = rng.random()
    if u < style.right_date and facts.day:
        slots.append([DATE.format(day=facts.day)])
    elif style.right_date <= u < style.right_date + style.wrong_date:
        slots.append([DATE.format(day=rng.choice([d for d in DAYS if d != facts.day]))])
    else:
        slots.append([])
    slots.append([rng.choice(HEDGES)] if rng.random() < style.hedge else [])
    slots.extend(leading(rng.sample(s, len(s)), p) for s, p in ((FLATTERY, style.flattery), (FILLERS, style.filler)))
    slots.append([rng.choice(CLOSINGS)])
    return slots


def write_reply(slots: Sequence[Sequence[str]], repeat: float, rng: random.Random) -> str:
    """Return the reply with `slots`; with probability `repeat` a remedy, if there is one, is repeated later."""
    out = [sentence for slot in slots for sentence in slot]
    remedies = [i for i, sentence in enumerate(out) if sentence in REMEDIES.values()]
    if remedies and rng.random() < repeat:
        twice = rng.choice(remedies)
        out.insert(rng.randrange(twice + 1, len(out)), out[twice])
    return " ".join(out)


def draw_reply(facts: Facts, style: Style, rng: random.Random) -> str:
    """Draw a reply to the prompt of `facts` by `style`."""
    return write_reply(draw_slots(facts, style, rng), style.repeat, rng)


def sentences(text: str) -> list[str]:
    """Split `text` after each full stop or question mark, with white space normalised."""
    return [" ".join(s.split()) for s in re.findall(r"[^.?]+[.?]?", text) if s.strip()]


@lru_cache(maxsize=1)
def _issue_of() -> dict[str, str]:
    return {form.format(item=item): issue for issue, forms in COMPLAINTS.items() for form in forms for item in ITEMS}


def read_prompt(prompt: Sequence[Message]) -> Facts:
    """Return the facts that a prompt of this task states.

    Raises:
        ValueError: the prompt is not one of this task's.
    """
    if [m.get("role") for m in prompt] != ["system", "user"]:
        raise ValueError("a support-desk prompt is one system message (the policy) and one user message")
    policy, user = sentences(prompt[0]["content"]), sentences(prompt[1]["content"])
    issues = tuple(_issue_of()[s] for s in user if s in _issue_of())
    if len(policy) != 2 or not issues or not user[0].endswith(" here."):
        raise ValueError(f"not a support-desk prompt: {prompt[0]['content']!r} / {prompt[1]['content']!r}")
    day = policy[1].removeprefix("Work is done by ").rstrip(".")
    return Facts(issues=issues, refunds=policy[0] == "Refunds are allowed.", day=day if day in DAYS else None)


@lru_cache(maxsize=1)
def _reply_sentences() -> dict[str, tuple[str, Any]]:
    kinds: dict[str, tuple[str, Any]] = {REFUND: ("refund", None)}
    kinds |= {DATE.format(day=day): ("date", day) for day in DAYS}
    kinds |= {remedy: ("remedy", issue) for issue, remedy in REMEDIES.items()}
    kinds |= {echo: ("echo", issue) for issue, echo in ECHOES.items()}
    groups = {"hedge": HEDGES, "flattery": FLATTERY, "filler": FILLERS, "opening": OPENINGS, "closing": CLOSINGS}
    for kind, group in groups.items():
        kinds |= dict.fromkeys(group, (kind, None))
    return kinds


@dataclass(frozen=True)
class Reading:
    """Counts of what a reply says, relative to the facts of its prompt."""

    resolved: int
    wrong_remedies: int
    refund: bool
    right_date: bool
    wrong_dates: int
    echoes: int
    hedges: int
    flattery: int
    fillers: int
    repeats: int
    """Number of repeated sentences."""
    unknown_words: int


def read_reply(facts: Facts, reply: str) -> Reading:
    """Count what `reply` says. A repeated sentence counts only as a repeat, an unknown one by its words."""
    seen: set[str] = set()
    count: Counter[str] = Counter()
    resolved: set[str] = set()
    dates: list[str] = []
    for sentence in sentences(reply):
        kind, what = _reply_sentences().get(sentence, ("unknown", None))
        if kind == "unknown":
            count[kind] += len(re.findall(r"\w+|[^\w\s]", sentence))
        elif sentence in seen:
            count["repeat"] += 1
        elif kind == "remedy" and what in facts.issues:
            resolved.add(what)
        elif kind == "date":
            dates.append(what)
        else:
            count[kind] += 1
        seen.add(sentence)
    return Reading(
        resolved=len(resolved), wrong_remedies=count["remedy"], refund=count["refund"] > 0,
        right_date=facts.day is not None and facts.day in dates, wrong_dates=sum(d != facts.day for d in dates),
        echoes=count["echo"], hedges=count["hedge"], flattery=count["flattery"], fillers=count["filler"],
        repeats=count["repeat"], unknown_words=count["unknown"],
    )  # fmt: skip
