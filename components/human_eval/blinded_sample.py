"""The first half of human_eval: sample responses, and write them blinded as a sheet with a sealed key."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from components.base.errors import UserError
from components.base.hashing import digest_file
from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.data.splits import loose_key
from components.data.support_desk.task import task_name
from components.data.tables.published import has_split, read_split, rows_at
from components.data.words import seen
from components.gates.self_checks import SelfChecks
from components.human_eval.batch.attention import held_out_replies, with_attention
from components.human_eval.batch.halves import JUDGED_IN
from components.human_eval.blinding import AuthoredItem, Item, blind, sealed_key, sheet_item
from components.human_eval.config import CRITERIA, HumanEvalConfig, SampleJob
from components.human_eval.respond import respond
from components.human_eval.selection import HeldOutPrompt, choose
from components.human_eval.sheet import (
    GUIDELINES_FILE,
    RATERS,
    SIMULATED,
    TEXTS,
    AskedCriterion,
    SheetInfo,
    SheetRow,
    as_record,
    criterion_columns,
    header_lines,
    rater_file,
    rating_columns,
    write_joint,
    write_raters_files,
)
from components.human_eval.sheet_checks import Authors, check_sheet


def run(job: SampleJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Sample prompts of `inputs["data"]` and responses of `inputs["sft"]` and `inputs["ppo"]`; write a sheet.

    `artifact/` has `guidelines.md`; `raters/rater_1.csv` to `rater_k.csv`, each with instructions for one rater;
    `sheet.csv`, `sheet.jsonl` and `sheet.json` with a column for each rater; `key.json` and `responses.jsonl`, which
    tell the sides and must not be given out; and `ratings.simulated.csv` if the judges are simulated. If people judge,
    `inputs["seal"]` is the home's secret (`blinding.home_secret`), with which the key is sealed.

    Raises:
        UserError: there are no held-out prompts; or simulated judges are asked for on other data than the built-in
            task's, or more of them than exist.
    """
    config, artifact = job.human_eval, out / "artifact"
    check_judges(config, inputs["data"])
    rows = not_judged_yet(held_out_prompts(inputs["data"]), inputs["data"], config.items)
    chosen = choose(rows, config, job.seed)
    prompts, checks = [c.prompt for c in chosen], SelfChecks()
    responses = respond(job, inputs, prompts, out, observe, then=Authors(checks, job, prompts, inputs))
    texts = {side: [r["text"] for r in responses[side]] for side in ("sft", "policy")}
    key = inputs["seal"].read_bytes() if config.judges == "people" else b""
    repeats, attention = (round(share * len(chosen)) for share in (config.repeats, config.attention))
    items, salt = blind(chosen, texts["sft"], texts["policy"], job.seed, key, repeats)
    if attention:
        items = with_attention(items, held_out_replies(inputs["data"]), attention, salt)
    write_rows(
        artifact / "responses.jsonl",
        (AuthoredItem(item=i.item, stratum=i.chosen.stratum, category=i.chosen.category, prompt=i.chosen.prompt,
                    sft=i.sft, policy=i.policy) for i in items if i.distortion is None),
    )  # fmt: skip
    write_blinded(artifact, items, salt, config, job.seed)
    check_sheet(checks, artifact, inputs["data"], prompts, responses)
    checks.write(out)
    return {
        "human_eval/sampled": float(len(chosen)),
        "human_eval/repeated": float(sum(item.repeat_of is not None for item in items)),
        "human_eval/attention_items": float(sum(item.distortion is not None for item in items)),
        "human_eval/strata": float(len({c.stratum for c in chosen})),
        "human_eval/identical": sum(map(str.__eq__, map(seen, texts["sft"]), map(seen, texts["policy"]))) / len(chosen),
        "human_eval/sft_ended": sum(r["ended"] for r in responses["sft"]) / len(chosen),
        "human_eval/policy_ended": sum(r["ended"] for r in responses["policy"]) / len(chosen),
    }


def held_out_prompts(data: Path) -> Sequence[HeldOutPrompt]:
    """Return the prompts of the test split. Raises UserError if there is none."""
    if rows := read_split(data / "prompts.test"):
        return rows
    raise UserError("human_eval: the data hold no held-out prompt to judge. Raise data.split.test.")


def write_blinded(artifact: Path, items: Sequence[Item], salt: str, config: HumanEvalConfig, seed: int) -> None:
    """Write the sealed key, the sheet that commits to it and, if judges are simulated, their ratings."""
    write_json(artifact / "key.json", sealed_key(items, salt))
    sheet = write_sheet(artifact, items, config)
    if config.judges == "simulated":
        write_joint(artifact / SIMULATED, simulate(sheet, items, config, seed), config.raters)


def not_judged_yet(rows: Sequence[HeldOutPrompt], data: Path, items: int) -> Sequence[HeldOutPrompt]:
    """Return `rows` without the prompts that people judged in earlier rounds, if `items` are left; else all.

    Without this, every round would sample again the earlier prompts that are held out for good, and fewer prompts each
    time that may be trained on.
    """
    pairs = data / "pairs.test"
    earlier = read_split(pairs) if has_split(pairs) else ()
    rated = {loose_key(row["prompt"]) for row in earlier if JUDGED_IN in row}
    if not rated:
        return rows
    fresh = [place for place, row in enumerate(rows) if loose_key(row["prompt"]) not in rated]
    return rows_at(rows, fresh) if len(fresh) >= items else rows


def check_judges(config: HumanEvalConfig, data: Path) -> None:
    """Refuse simulated judges on data for which there are none, before anything is generated."""
    if config.judges != "simulated":
        return
    if task_name(data) != "support-desk":
        raise UserError(
            "human_eval.judges is `simulated`, but the data are not the built-in task's, and judges can be "
            "simulated only for that task. Set human_eval.judges=people and fill in the sheet."
        )
    from components.data.support_desk.desk import JUDGES

    if config.raters > JUDGES:
        raise UserError(f"human_eval.raters is {config.raters}, and there are {JUDGES} simulated judges. Lower it.")


def write_sheet(artifact: Path, items: Sequence[Item], config: HumanEvalConfig) -> list[SheetRow]:
    """Write the raters' files and the sheet. `key.json` must be there: the sheet commits to its sha256."""
    commitment = digest_file(artifact / "key.json")
    empty, criteria = ("",) * config.raters, config.criteria
    sheet = []
    for number, item in enumerate(items, 2):
        a, b = (item.policy, item.sft) if item.policy_side == "a" else (item.sft, item.policy)
        none = (empty,) * len(criteria)
        sheet.append(
            SheetRow(number, sheet_item(item.item, commitment), as_text(item.chosen.prompt), a, b, empty, none)
        )
    write_joint(artifact / "sheet.csv", sheet, config.raters, criteria=criteria)
    write_rows(artifact / "sheet.jsonl", (as_record(row, criteria) for row in sheet))
    questions: list[AskedCriterion] = [{"name": name, "question": CRITERIA[name]} for name in criteria]
    lines = header_lines(config.instructions, config.ratings, questions)
    write_raters_files(artifact / RATERS, sheet, config.raters, lines, criteria)
    text = config.instructions.strip() + "\n"
    (artifact / GUIDELINES_FILE).write_text(text, encoding="utf-8", newline="\n")
    info: SheetInfo = {
        "guidelines": text,
        "guidelines_sha256": digest_file(artifact / GUIDELINES_FILE),
        "criteria": questions,
        "instructions": "\n".join(lines),
        "columns": [*TEXTS, *rating_columns(config.raters), *criterion_columns(criteria, config.raters)],
        "ratings": list(config.ratings),
        "raters": config.raters,
        "items": sum(item.repeat_of is None and item.distortion is None for item in items),
        "repeated": sum(item.repeat_of is not None for item in items),
        "key_sha256": commitment,
        "for_raters": [f"{RATERS}/{rater_file(rater)}" for rater in range(1, config.raters + 1)],
        "text_cells": "The CSV has an apostrophe before text that a spreadsheet would run as a formula (at the start "
        "of a cell or of a line, after a semicolon or a tab), and before an apostrophe there.",
    }
    write_json(artifact / "sheet.json", info)
    return sheet


def simulate(sheet: Sequence[SheetRow], items: Sequence[Item], config: HumanEvalConfig, seed: int) -> list[SheetRow]:
    """Fill in the sheet as the built-in task's careful simulated judges, who see only what a rater sees."""
    from components.data.support_desk.desk import simulated_judges

    rated = []
    for row, item in zip(sheet, items, strict=True):
        votes = simulated_judges(item.chosen.prompt, row.response_a, row.response_b, seed)
        rated.append(row._replace(ratings=tuple(votes[: config.raters])))
    return rated


def as_text(prompt: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation as a rater reads it."""
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)
