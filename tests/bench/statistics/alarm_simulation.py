"""Alarms in simulated runs of the built-in task: false ones with the tether, and planted rewards.

    python -m tests.bench.statistics.alarm_simulation --seeds 0-19 --planted 0-4

No model is trained. SFT's responses are the grammar's demonstrations. A policy with the tether is SFT tilted by the
annotators' utility, over the draws to each prompt, until KL is demo-long's target; its score is that utility with
noise, in SFT deviations, and the taste for the flaw is drawn for each seed. A planted reward pays for one feature
alone, and the tilt by it grows by the same step each update; of a role token it pays for each response that holds one.
Entropy and NLL are drawn as SFT's, so their monitors are not tested. Batches, limits and updates are demo-long's.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from components.data.support_desk.desk import DEMONSTRATOR, compliant_utility, gold_of, helpful_utility
from components.data.support_desk.grammar import Facts, draw_prompt, draw_reply, read_reply
from components.ppo.monitors.alarms import Limits
from components.ppo.monitors.measures import PHRASES, Batch
from components.stats.intervals import FloatArray
from tests.bench.tools import argument_parser, seed_range

BATCH, SFT, UPDATES, RATE, TARGET, BETA = 128, 256, 60, 0.01, 3.0, 0.1
TOKENS = 997
"""Of the vocabulary; the training data holds all."""
"""Of demo-long: responses of an update and of SFT, updates, false alarms a run, KL's target and β."""
PROMPTS, DRAWS = 256, 64
REACHED = 25
"""Update at which KL is at its target."""
SPECIAL = "special_token"


class Reply(NamedTuple):
    """A reply with what is known of it."""

    prompt: str
    text: str
    utility: float
    gold: float

    @property
    def length(self) -> int:
        """Words and marks."""
        return len(self.text.replace(".", " .").replace("?", " ?").split())


def says(phrases: Sequence[str]) -> Callable[[Reply], float]:
    """Whether a reply has one of these."""
    return lambda reply: float(any(phrase.lower() in reply.text.lower() for phrase in phrases))


PLANTED: dict[str, Callable[[Reply], float]] = {
    "flattery": says(PHRASES["flattery"]),
    "hedge": says(PHRASES["hedge"]),
    "length": lambda reply: float(reply.length),
    "template": says(("We are sorry. We will",)),
}
"""Feature of a reply by the name of the alarm that it should raise."""


class World:
    """A seed: prompts with many replies of SFT each, and the taste of its reward model."""

    def __init__(self, seed: int) -> None:
        self.rng, self.numbers = random.Random(f"alarms {seed}"), np.random.default_rng(seed)
        self.flaw = self.rng.uniform(0.5, 1.5)
        drawn = [draw_prompt(self.rng) for _ in range(PROMPTS)]
        self.facts = [(facts, prompt[1]["content"]) for prompt, facts in drawn]
        self.replies = [[self.reply(*asked) for _ in range(DRAWS)] for asked in self.facts]
        self.sft = [self.reply(*asked) for asked in self.facts[:SFT]]

    def reply(self, facts: Facts, prompt: str) -> Reply:
        """A reply of SFT, and what a reward model that learned the annotators' taste thinks of it."""
        text = draw_reply(facts, DEMONSTRATOR, self.rng)
        said = read_reply(facts, text)
        utility = helpful_utility(facts, said, self.flaw) + compliant_utility(facts, said) + self.rng.gauss(0, 0.4)
        return Reply(prompt, text, utility, gold_of(facts, said))

    def tilted(self, values: FloatArray, by: float) -> tuple[list[Reply], FloatArray, float]:
        """A batch of SFT tilted by exp(`by` · value), each reply's log-ratio to SFT, and KL.

        Args:
            values: (PROMPTS, DRAWS).
        """
        logits = by * values
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        ratios = np.log(np.maximum(weights * DRAWS, 1e-12))
        asked = self.numbers.choice(PROMPTS, BATCH, replace=False)
        taken = [int(self.numbers.choice(DRAWS, p=weights[i])) for i in asked]
        kl = float((weights * ratios).sum(1).mean())
        return [self.replies[i][j] for i, j in zip(asked, taken, strict=True)], ratios[asked, taken], kl

    def batch(self, replies: Sequence[Reply], scores: FloatArray, kl: FloatArray, special: Sequence[int] = ()) -> Batch:
        """As the monitors see it; tokens are words."""
        lengths = np.array([float(reply.length) for reply in replies])
        ids = [[zlib.crc32(word.encode()) % TOKENS for word in reply.text.split()] for reply in replies]
        nll = self.numbers.gamma(9, 0.1, len(replies))
        return Batch([r.prompt for r in replies], [r.text for r in replies], ids, list(special) or [0] * len(replies),
                     lengths, scores, nll, 0.5 * lengths * self.numbers.gamma(9, 0.11, len(replies)), kl)  # fmt: skip


class Update(NamedTuple):
    """What an update showed."""

    update: int
    alarms: list[str]
    proxy: float
    kl: float
    gold: FloatArray


def watched(world: World, score: Callable[[Reply], float], policy: Callable[[int], tuple[list[Reply], FloatArray]],
            special: Callable[[int], float] = lambda update: 0.0) -> Iterator[Update]:  # fmt: skip
    """A run's updates: each batch of `policy`, scored in SFT deviations of `score`, judged by SFT's limits.

    Args:
        special: share of responses at an update with a role token, for each of which the score is 3 deviations higher.
    """
    raw = np.array([score(reply) for reply in world.sft])
    shift, scale = float(raw.mean()), float(raw.std())
    limits = Limits.of(world.batch(world.sft, (raw - shift) / scale, np.zeros(len(raw))), RATE, UPDATES, range(TOKENS))
    for update in range(1, UPDATES + 1):
        replies, kl = policy(update)
        roles = (world.numbers.random(len(replies)) < special(update)).astype(int)
        scores = (np.array([score(reply) for reply in replies]) - shift) / scale + 3.0 * roles
        _, alarms = limits.judge(world.batch(replies, scores, kl, roles.tolist()), BETA)
        gold = np.array([reply.gold for reply in replies])
        yield Update(update, [each.name for each in alarms], float(scores.mean()), float(kl.mean()), gold)


def tethered(world: World) -> list[Update]:
    """A run whose KL rises to its target and stays there."""
    values = np.array([[reply.utility for reply in replies] for replies in world.replies])
    low, high = 0.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if world.tilted(values, middle)[2] < TARGET else (low, middle)

    def policy(update: int) -> tuple[list[Reply], FloatArray]:
        replies, ratios, _ = world.tilted(values, low * min(1.0, update / REACHED))
        return replies, ratios

    return list(watched(world, lambda reply: reply.utility, policy))


def planted(world: World, name: str, step: float) -> list[Update]:
    """A run that is paid for one feature alone, until its proxy reward is certainly above 1."""
    feature = PLANTED.get(name, lambda reply: reply.utility)
    values = np.array([[feature(reply) for reply in replies] for replies in world.replies])
    of_role = name not in PLANTED

    def policy(update: int) -> tuple[list[Reply], FloatArray]:
        replies, ratios, _ = world.tilted(values / values.std(), 0.0 if of_role else step * update)
        return replies, ratios

    found = list[Update]()
    for each in watched(world, feature, policy, lambda u: min(1.0, 0.002 * (1 + 6 * step) ** u) if of_role else 0.0):
        found.append(each)
        if each.proxy > 2:
            break
    return found


def told_of_tethered(seed: int, run: Sequence[Update]) -> tuple[str, int]:
    """A line, and the number of names that raised an alarm."""
    first = dict[str, int]()
    for each in reversed(run):
        first |= dict.fromkeys(each.alarms, each.update)
    last = run[-10:]
    proxy, kl = np.mean([each.proxy for each in last]), np.mean([each.kl for each in last])
    return f"tethered {seed}: proxy {proxy:.2f}, KL {kl:.2f}, alarms {first}", len(first)


def named_before(run: Sequence[Update], name: str) -> tuple[bool, str]:
    """Whether an alarm `name` was raised before the proxy had gained 1 deviation, and a line."""
    alarm = next((each for each in run if name in each.alarms), None)
    gained = next((each.update for each in run if each.proxy >= 1), UPDATES + 1)
    at = "never" if alarm is None else f"at update {alarm.update} (proxy {alarm.proxy:.2f})"
    others = Counter(alarm for each in run if each.update < gained for alarm in each.alarms if alarm != name)
    text = f"{name} {at}; proxy reached 1 at update {gained}; others before {dict(others)}"
    return alarm is not None and alarm.update <= gained and (alarm.proxy < 1 or alarm.update < gained), text


def main() -> None:
    """Simulate what is asked for and print a line a run."""
    options = argument_parser(__doc__)
    options.add_argument("--seeds", type=seed_range, default="0-19", help="as 10-19 or 0-4,8")
    options.add_argument("--planted", type=seed_range, default="0-4", help="those of them with planted rewards too")
    options.add_argument("--step", type=float, default=0.05, help="by which the tilt to a planted feature grows")
    given = options.parse_args()
    raised, held = 0, Counter[str]()
    for seed in given.seeds:
        world = World(seed)
        text, count = told_of_tethered(seed, tethered(world))
        raised += count
        print(text, flush=True)
        for name in (*PLANTED, SPECIAL) if seed in given.planted else ():
            holds, text = named_before(planted(world, name, given.step), name)
            held[name] += holds
            print(f"planted {seed}: {text}", flush=True)
    print(f"tethered: {raised} alarms in {len(given.seeds)} runs")
    print(f"named before the proxy had gained 1 deviation, of {len(given.planted)}: {dict(held)}")


if __name__ == "__main__":
    main()
