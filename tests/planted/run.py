"""`make planted`: plant each fault of faults.yaml in a copy of the code, run the demo, and record what noticed it.

    python -m tests.planted.run                       every fault that has no line for this code, and docs/trust.md:
                                                      first those without one for today's checks, cheap ones first
    python -m tests.planted.run --only NAME           one fault, though it has a line (may be given again)
    python -m tests.planted.run --sample 3            three faults, drawn by the commit's id
    python -m tests.planted.run --seeds 0-19          undisturbed runs, for false alarms and the deviation of gold
    python -m tests.planted.run --small 3             three faults that a self-check stops, drawn by the commit's id and
                                                      run in the profile `tiny`: exit 1 unless each is stopped again
    python -m tests.planted.run --page                only write docs/trust.md from the lines that are there

The demo runs with 16 updates of PPO. A fault is computed on the undisturbed run's earlier stages (`HOW` in
catalogue.py), which each set of options computes once. Nothing is changed in this checkout. Lines go to
tests/planted/results.jsonl as they come, so an interrupted command continues; a fault keeps its newest line. A failed
gate is recorded, then waived, to see what the run would have been called. `--small` records nothing.
"""

import argparse
import datetime
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.homes import Home
from tests.planted import outcome, page
from tests.planted.catalogue import ROOT, STAGES, Fault, read
from tests.planted.copies import CHECKS, SIZE, Ended, Tether, code_digest, commit, copied, damage, parted, plant
from tests.planted.outcome import Line
from tests.servers import PrefectServer

RESULTS = Path(__file__).with_name("results.jsonl")
WORK = ROOT / ".tether" / "planted"
INTERRUPTED = 9
"""The update of PPO after which a run of `resume` gets Ctrl-C: one after a checkpoint."""
SMALL = ("tiny", "--until", "ppo")
"""The run of `--small`: its models learn next to nothing, and most self-checks need no more."""
MORE = (
    "direction", "prompt_use", "calibration", "first_scores", "sampled", "fresh", "sft_loss", "loss", "beta",
    "evaluation",
)  # fmt: skip
"""Self-checks that need a model that has learned, or more tokens or updates."""
_BASES, _FILE = threading.Lock(), threading.Lock()


class Planting:
    """Runs of this checkout's code, with and without faults."""

    def __init__(
        self, results: Path = RESULTS, work: Path = WORK, profile: Sequence[str] = ("demo",), size: Sequence[str] = SIZE
    ) -> None:
        """`profile` names the runs' profile, and after it how far they go; `size` are their options."""
        self.results, self.work, self.commit = results, work, commit()
        self.profile, self.until, self.size = profile[0], profile[1:], size
        self.code, self.checks = code_digest(), code_digest(within=CHECKS)
        self.environment: dict[str, str] = {}

    def lines(self) -> list[Line]:
        """Return all recorded lines, of any commit."""
        if not self.results.exists():
            return []
        return [json.loads(text) for text in self.results.read_text(encoding="utf-8").splitlines()]

    def to_do(self, faults: Sequence[Fault]) -> list[Fault]:
        """Return the faults without a line for this code, those without one for today's checks first.

        Cheap ones come first, and the kinds take turns.
        """
        lines = {line["digest"]: line for line in self.lines() if line["size"] == [*self.size]}
        age = {fault: lines[fault.digest()]["checks"] == self.checks for fault in faults if fault.digest() in lines}
        left = [fault for fault in faults if fault not in age or lines[fault.digest()]["code"] != self.code]
        turns, ordered = Counter[tuple[bool, str]](), list[tuple[bool, int, float, Fault]]()
        for fault in sorted(left, key=cost):
            known = age.get(fault, False)
            turns[known, fault.kind] += 1
            ordered.append((known, turns[known, fault.kind], cost(fault), fault))
        return [each[-1] for each in sorted(ordered, key=lambda each: each[:-1])]

    def write(self, line: Line) -> None:
        """Add a line, in place of an earlier one of the same fault, seed and options."""
        with _FILE:
            kept = [other for other in self.lines() if not is_same(other, line)]
            ordered = sorted([*kept, line], key=lambda one: (one["fault"], one["seed"], one["options"]))
            text = "".join(outcome.document(one) + "\n" for one in ordered)
            temporary = self.results.with_suffix(".new")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.results)

    def about(self, name: str, digest: str, options: Sequence[str], seed: int) -> dict[str, Any]:
        """Return the fields of a line that say what was run."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return {
            "fault": name, "digest": digest, "commit": self.commit, "code": self.code, "checks": self.checks,
            "size": [*self.size], "date": today, "seed": seed, "options": [*options],
        }  # fmt: skip

    def command(self, options: Sequence[str], seed: int) -> list[str]:
        """Return the arguments of a run with further `options`."""
        size = () if any(option.startswith("policy.method=") for option in options) else self.size  # they are PPO's
        return ["run", self.profile, *self.until, *parted([*size, f"seed={seed}", *options])]

    def base(self, options: Sequence[str] = (), seed: int = 0) -> tuple[Home, Line]:
        """Return the home and the line of the undisturbed run with further `options`; the first caller computes it.

        Other code and other options run in the same home, or in a copy of it, where the store has what is the same.
        """
        plain = self.base((), seed)[0] if options else None
        folder = self.work / "undisturbed" / "-".join([str(seed), *options]).replace("=", "_")
        path, command = folder / "line.json", self.command(options, seed)
        with _BASES:
            line = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if (line.get("code"), line.get("size")) != (self.code, [*self.size]):
                shutil.rmtree(folder / "code", ignore_errors=True)
                if plain is not None and not (folder / "home").exists():
                    plain.copy(folder / "home")
                tether = Tether(copied(folder / "code"), folder / "home", self.environment)
                line = self._to_the_end(tether, tether(*command), command) | self.about("", "", options, seed)
                if line["exit"] not in (0, 3):
                    raise RuntimeError(f"the undisturbed run ended with {line['exit']}: {line['message']}")
                path.write_text(json.dumps(line), encoding="utf-8")
                self.write(line)
        return Home(folder / "home"), line

    def plant(self, fault: Fault, seed: int = 0) -> Line:
        """Run the demo with a fault, record and return its line."""
        base, undisturbed = self.base(fault.set, seed)
        folder = self.work / "faults" / fault.name
        shutil.rmtree(folder, ignore_errors=True)
        tether = Tether(copied(folder / "code"), base.copy(folder / "home").path, self.environment)
        if fault.damage:
            damage(tether.home, fault.damage)
        plant(fault, tether.code)
        whole = self.command(fault.set, seed)
        again = ["rerun", fault.stage, "--from", tether.status()["run"], *self.until]
        how = {"resume": self._resumed, "same": self._same, "twice": self._twice}.get(fault.how)
        command = whole if fault.how == "run" else again
        line = self._to_the_end(tether, tether(*command), command) if how is None else how(fault, tether, whole, again)
        if fault.how == "resume" and "ppo" in line["digests"]:
            line["same"] = line["digests"]["ppo"] == undisturbed["digests"]["ppo"]
        line |= self.about(fault.name, fault.digest(), fault.set, seed)  # type: ignore[assignment]
        line["beside"] = Line(metrics=outcome.kept(undisturbed["metrics"]), digests=undisturbed["digests"])
        self.write(line)
        shutil.rmtree(folder)
        return line

    def _to_the_end(self, tether: Tether, ended: Ended, command: Sequence[str]) -> Line:
        """Return the line of a run, which is run again with its failed gates waived until it ends or breaks.

        A `rerun` would compute its stage again, so it goes on with the stage after the one that stopped.
        """
        line, spent, waived = outcome.measured(tether, ended), ended.cpu, list[str]()
        last, end_at = line, command[command.index("--until") + 1] if "--until" in command else STAGES[-1]
        while ended.code == 3 and (new := [gate for gate in last["gates"] if gate not in waived]):
            waived += new
            if last["stopped_at"] == end_at:  # with these gates waived the run would end
                break
            if command[0] == "rerun":
                command = ["rerun", STAGES[STAGES.index(last["stopped_at"]) + 1], "--from", ended.run]
            gates = [part for gate in waived for part in ("--waive", gate)]
            ended = tether(*command, *gates, "--because", "planted fault: what would follow")
            last, spent = outcome.measured(tether, ended), spent + ended.cpu
        ends = not ended.code or (ended.code == 3 and last["stopped_at"] == end_at)
        end = "passed" if ends else f"exit {ended.code} at {last['stopped_at']}"
        more = {name: last[name] for name in ("metrics", "digests")}  # type: ignore[literal-required]
        return Line(**{**line, **more, "waived": waived, "end": end, "total": round(spent, 1)})

    def _resumed(self, fault: Fault, tether: Tether, whole: Sequence[str], again: Sequence[str]) -> Line:
        ended = tether(*again, interrupted_after=INTERRUPTED)
        if not ended.code:
            raise RuntimeError("the run ended before it could be interrupted")
        if ended.code != 130:
            return self._to_the_end(tether, ended, again)
        return self._to_the_end(tether, tether(*again), again)

    def _same(self, fault: Fault, tether: Tether, whole: Sequence[str], again: Sequence[str]) -> Line:
        until = [*again, "--until", fault.stage]
        first = outcome.measured(tether, tether(*until, "--refresh", fault.stage))
        if first["exit"]:
            return Line(**{**first, "waived": [], "end": f"exit {first['exit']}", "total": first["seconds"]})
        line = self._to_the_end(tether, tether(*until, "--refresh", fault.stage), until)
        line["same"] = line["digests"].get(fault.stage) == first["digests"].get(fault.stage)
        return line

    def _twice(self, fault: Fault, tether: Tether, whole: Sequence[str], again: Sequence[str]) -> Line:
        until, data = [*whole, "--until", fault.stage], list[str]()
        if fault.swap:
            file = tether.home.parent / "preferences.jsonl"
            rows = written_preferences(file)
            data = ["--set", f"data.preferences={file}"]
        first = tether(*until, *data)
        if first.code:
            return self._to_the_end(tether, first, [*until, *data])
        if fault.swap:
            exchanged(file, rows)
        if fault.edit_again:
            plant(next(other for other in read() if other.name == fault.edit_again), tether.code)
        second = [*until, *data, *parted(fault.again)]
        line = self._to_the_end(tether, tether(*second), second)
        line["cached"] = [stage["name"] for stage in tether.status()["stages"] if stage.get("cached")]
        return line


def is_same(one: Line, other: Line) -> bool:
    """Return whether two lines are of the same fault, seed and options, or undisturbed and of the same size too."""
    names = ("fault", "seed", "options") if one["fault"] else ("fault", "seed", "options", "size")
    return all(one[name] == other[name] for name in names)  # type: ignore[literal-required]


def cost(fault: Fault) -> float:
    """Return about how many processor seconds a fault takes."""
    stages = dict(zip(STAGES, (15, 30, 90, 60, 15), strict=True))
    alone, whole = stages[fault.stage], sum(stages.values())
    later = whole - sum(stages[name] for name in STAGES[: STAGES.index(fault.stage)])
    return {"same": 2 * alone, "twice": whole, "resume": alone + later, "run": whole}.get(fault.how, later)


def written_preferences(file: Path) -> list[dict[str, Any]]:
    """Write pairs of the built-in task to `file`, as people's data would be and enough for the gates; return them."""
    from components.data.support_desk.desk import SupportDeskConfig, generate

    rows = generate(0, SupportDeskConfig(demonstrations=50, pairs=5600))[1]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def exchanged(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the pairs with chosen and rejected exchanged, which leaves the file's size."""
    other = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in other), encoding="utf-8")


def chosen(faults: Sequence[Fault], names: Sequence[str], sample: int | None, seed: str) -> list[Fault]:
    """Return the faults with these names, in their order, or a sample drawn by `seed`, or all.

    Raises:
        SystemExit: there is no fault of a name.
    """
    if unknown := {*names} - {fault.name for fault in faults}:
        raise SystemExit(f"faults.yaml has no fault {', '.join(sorted(unknown))}.")
    if names:
        return sorted((fault for fault in faults if fault.name in names), key=lambda fault: names.index(fault.name))
    ordered = sorted(faults, key=lambda fault: fault.name)
    return ordered if sample is None else random.Random(seed).sample(ordered, min(sample, len(ordered)))


def stopped_by(line: Line) -> str:
    """Return the self-check that stopped a run, as `self-check NAME`; empty if none did."""
    caught, _ = outcome.caught_by(line, ())
    return caught[0] if line["exit"] == 1 and caught[0].startswith("self-check") else ""


def stopped_in_training(planting: Planting) -> list[tuple[Fault, str]]:
    """Return the faults of code that a self-check stopped before human_eval by their recorded lines, with the check."""
    checks = {line["digest"]: stopped_by(line) for line in planting.lines() if line["stopped_at"] in STAGES[:-1]}
    small = {digest for digest, check in checks.items() if check and not check.endswith(tuple(f".{n}" for n in MORE))}
    faults = [fault for fault in read() if fault.digest() in small and fault.how == "rerun" and not fault.set]
    return [(fault, checks[fault.digest()]) for fault in faults]


def small_sample(count: int, recorded: Planting, small: Planting) -> list[str]:
    """Plant `count` faults, drawn by the commit's id, in small runs; return what went otherwise than was recorded.

    The undisturbed small run, which is computed first, must end without a word of a self-check.
    """
    known = stopped_in_training(recorded)
    drawn = random.Random(recorded.commit).sample(known, min(count, len(known)))
    print(f"drawn by {recorded.commit}: {', '.join(fault.name for fault, _ in drawn)}", flush=True)
    undisturbed = small.base()[1]
    if undisturbed["exit"] or any(name.startswith("self-check") for name in undisturbed["warned"]):
        return [f"the undisturbed run: {undisturbed['message'] or undisturbed['warnings']}"]
    with ThreadPoolExecutor(2) as pool:
        lines = [*pool.map(small.plant, (fault for fault, _ in drawn))]
    return [
        f"{fault.name}: {check} stopped it in the demo; here {stopped_by(line) or 'none did'}: {line['message']}"
        for (fault, check), line in zip(drawn, lines, strict=True)
        if stopped_by(line) != check
    ]


def seeds_of(text: str) -> Iterator[int]:
    """Yield the seeds that `0-19` or `0,3,5` names."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@contextmanager
def shared_server() -> Iterator[dict[str, str]]:
    """Start a Prefect server for all commands; yield the variables that name it."""
    with tempfile.TemporaryDirectory() as folder:
        server = PrefectServer(Path(folder)).start()
        try:
            yield {"PREFECT_API_URL": server.api}
        finally:
            server.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; return 0, or 1 if a run could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seeds", metavar="0-19")
    parser.add_argument("--small", type=int, metavar="N")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", action="store_true")
    asked, planting, broken = parser.parse_args(arguments), Planting(), list[str]()
    if asked.page:
        page.write(planting.lines())
        return 0
    if asked.small:
        with shared_server() as variables, tempfile.TemporaryDirectory() as folder:
            small = Planting(Path(folder) / "results.jsonl", Path(folder), SMALL, ("ppo.updates=2",))
            small.environment = variables
            wrong = small_sample(asked.small, planting, small)
        print(*wrong or ["each was stopped again"], sep="\n")
        return int(bool(wrong))

    def guarded(what: str, call: Any) -> None:
        try:
            line = call()
            print(f"{what}: {line.get('stopped_at') or 'ran to the end'} {line['gates'] or line['warned']}", flush=True)
        except Exception as error:  # one run that breaks must not end the others
            broken.append(f"{what}: {type(error).__name__}: {error}")
            print(broken[-1], file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
    with shared_server() as planting.environment, ThreadPoolExecutor(asked.jobs) as pool:
        if asked.seeds:
            for seed in seeds_of(asked.seeds):
                pool.submit(guarded, f"seed {seed}", lambda seed=seed: planting.base((), seed)[1])
        else:
            faults = chosen(read(), asked.only, asked.sample, planting.commit)
            for fault in faults if asked.only else planting.to_do(faults):
                pool.submit(guarded, fault.name, lambda fault=fault: planting.plant(fault))
    page.write(planting.lines())
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
