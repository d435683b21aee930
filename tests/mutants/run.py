"""Break the lines that compute metrics, keys, gates and digests, one at a time, and see that a test fails each time.

    make mutants                       the whole sample
    make mutants ARGS="--minutes 30"   as many as that takes, in the order they were drawn
    make mutants ARGS="--survivors"    only those that survived the last run, after tests were added

Cosmic Ray makes the mutants. `mutants.toml` beside this file says what of, `equivalent.toml` which of them change
nothing. A place in the source is drawn by the seed, then one of its mutants, so that no operator counts for its many
replacements. Mutants are written into a copy of the checkout. Exit code 1: too few killed, or a listed mutant is gone.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_PRELOADED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
"""pytest says it of plugins that `preload` brought with it; warnings are errors here."""
RESULTS = ROOT / ".tether" / "mutants.jsonl"


class Mutant(NamedTuple):
    """One change of one place in a module."""

    module: str
    row: int
    column: int
    operator: str
    occurrence: int

    def source(self) -> str:
        """Digest of the module as it is now; empty where it is gone."""
        file = ROOT / self.module
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else ""

    def changed(self) -> tuple[str, str, str]:
        """The mutated source, and the first line that differs, before and after."""
        source = (ROOT / self.module).read_text(encoding="utf-8")
        mutated = mutate_code(source, plugins.get_operator(self.operator)(), self.occurrence)
        lines = zip(source.splitlines(), mutated.splitlines(), strict=False)
        before, after = next(((a, b) for a, b in lines if a != b), ("", ""))
        return mutated, before.strip(), after.strip()


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every mutant of a module but those of annotations, which nothing reads when it runs."""
    source = (ROOT / module).read_text(encoding="utf-8")
    tree, annotated = get_ast(source), _annotations(source)
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if operator.arguments() or name == "core/NoOp":
            continue
        positions = (start for node in ast_nodes(tree) for start, _ in operator().mutation_positions(node))
        for occurrence, (row, column) in enumerate(positions):
            if not any(begin <= (row, column) < end for begin, end in annotated):
                yield Mutant(module, row, column, name, occurrence)


def _annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    nodes = [
        getattr(node, field)
        for node in ast.walk(ast.parse(source)) for field in ("annotation", "returns") if getattr(node, field, None)
    ]  # fmt: skip
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes]


def draw(config: dict[str, Any], excused: set[tuple[str, str, str]]) -> list[Mutant]:
    """The sample, in the order drawn: an excused mutant makes room for one at the end and moves no other."""
    places: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for module in config["modules"]:
        for mutant in mutants_of(module):
            places[mutant[:3]].append(mutant)
    rng = random.Random(config["seed"])
    found: list[Mutant] = []
    for place in rng.sample(sorted(places), len(places)):
        mutant = rng.choice(places[place])
        mutated, *lines = mutant.changed()
        if _is_python(mutated) and (mutant.module, *lines) not in excused:
            found.append(mutant)
        if len(found) == config["sample"]:
            break
    modules, seed = config["modules"], config["seed"]
    print(f"{len(found)} mutants of {len(places)} places in {len(modules)} modules, drawn by {seed}")
    return found


def _is_python(text: str) -> bool:
    """Whether it parses: what doesn't, such as `{**a}` with another operator for `**`, any test would kill."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def excuses() -> set[tuple[str, str, str]]:
    """The equivalent mutants: module, line, what it becomes.

    Raises:
        SystemExit: one has no reason, or is not there.
    """
    listed = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8")).get("mutant", [])
    for each in listed:
        rows = [n for n, line in enumerate((ROOT / each["module"]).read_text(encoding="utf-8").splitlines(), 1)
                if line.strip() == each["line"]]  # fmt: skip
        of_line = (m.changed()[1:] for m in mutants_of(each["module"]) if m.row in rows)
        if not each["reason"].strip() or (each["line"], each["becomes"]) not in of_line:
            raise SystemExit(f"equivalent.toml: no such mutant, or no reason: {each}. Correct the entry or remove it.")
    return {(each["module"], each["line"], each["becomes"]) for each in listed}


def run_tests(copy: Path, tests: list[str], limit: float) -> str:
    """`passed`, `failed` or `timeout` of the tests in a copy of the checkout, as a fork of this process.

    `limit` is in seconds of processor time, which other work on the machine does not lengthen, and a quarter of the
    seconds by the clock.
    """
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        log = os.open(copy / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", _PRELOADED, *tests]))
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    end = time.monotonic() + 4 * limit
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return "passed" if status == 0 else "failed"
            time.sleep(0.05)
        return "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def copy_of_checkout(folder: Path) -> Path:
    """Tracked and new files, so that a run that is stopped leaves no mutant behind."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in files:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def recorded() -> dict[Mutant, str]:
    """The last outcome of each mutant that was run before, of modules that did not change since."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = [(Mutant(*row["mutant"]), row) for row in map(json.loads, lines)]
    return {mutant: row["outcome"] for mutant, row in rows if row["source"] == mutant.source()}


def run_all(config: dict[str, Any], sample: list[Mutant], minutes: float) -> dict[Mutant, str]:
    """Outcome of each mutant of the sample that there was time for; each is recorded as it is found."""
    found: dict[Mutant, str] = {}
    end = time.monotonic() + 60 * minutes
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, RESULTS.open("a", encoding="utf-8") as results:
        copy = copy_of_checkout(Path(folder))
        for mutant in sample:
            if time.monotonic() > end:
                break
            (copy / mutant.module).write_text(mutant.changed()[0], encoding="utf-8")
            outcome = run_tests(copy, config["modules"][mutant.module], config["limit_seconds"])
            shutil.copyfile(ROOT / mutant.module, copy / mutant.module)
            found[mutant] = "survived" if outcome == "passed" else "killed"
            row = {"mutant": mutant, "source": mutant.source(), "outcome": found[mutant]}
            print(json.dumps(row), file=results, flush=True)
            print(f"{len(found):4} {outcome:8} {mutant.module}:{mutant.row} {mutant.operator}", flush=True)
    return found


def check_unbroken(config: dict[str, Any], modules: list[str]) -> None:
    """See that the tests pass where nothing is broken: else they kill every mutant.

    Raises:
        SystemExit: they don't.
    """
    tests = list(dict.fromkeys(test for module in modules for test in config["modules"][module]))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_of_checkout(Path(folder))
        if run_tests(copy, tests, 3600) != "passed":
            print((copy / "tests.log").read_text(encoding="utf-8")[-3000:])
            raise SystemExit("These tests fail without a mutant: mend them first.")


def main() -> int:
    """Draw, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many, with what there is")
    parser.add_argument("--survivors", action="store_true", help="run only what survived; take the rest as recorded")
    parser.add_argument("--go-on", action="store_true", help="run only what was not run yet; take the rest as recorded")
    parser.add_argument("--skip-unbroken", action="store_true", help="don't run the tests without a mutant first")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that copies and tests go too
    config = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))
    sample, before = draw(config, excuses()), recorded()
    known = {m: before[m] for m in sample if m in before}
    kept = {m: o for m, o in known.items() if options.go_on or (options.survivors and o == "killed")}
    wanted = [m for m in sample if m not in kept and not (options.survivors and m not in known)]
    for name in config["preload"]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    if not options.skip_unbroken:
        check_unbroken(config, sorted({m.module for m in wanted}))
    found = kept | run_all(config, wanted, options.minutes)
    survivors = [m for m in sample if found.get(m) == "survived"]
    for mutant in survivors:
        _, before_, after = mutant.changed()
        print(f"\n{mutant.module}:{mutant.row}  {mutant.operator}\n  - {before_}\n  + {after}")
    share = 1 - len(survivors) / len(found) if found else 0.0
    print(f"\n{len(found)} of {len(sample)} mutants ran, {len(survivors)} survived: {share:.1%} killed")
    return int(share < config["least"] or (len(found) < len(sample) and options.minutes == float("inf")))


if __name__ == "__main__":
    sys.exit(main())
