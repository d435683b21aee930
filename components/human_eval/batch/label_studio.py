"""Label Studio: write pairs as tasks with a labelling config; read its JSON export as rows of a sheet.

Its `Pairwise` tag is not used, since it has no tie. Each annotator is a rater; raters are numbered by the users' ids in
Label Studio.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from components.base.errors import UserError
from components.human_eval.sheet import (
    FLAGS,
    MEANINGS,
    OF_CRITERIA,
    PEOPLE,
    TEXTS,
    AskedCriterion,
    guideline_blocks,
    rating_of,
)

Rows = list[tuple[int, Mapping[str, object]]]


class Annotation(NamedTuple):
    """One annotator's answers to one task."""

    row: int
    """Number of the task in the export."""
    data: Mapping[str, object]
    annotator: str
    answers: dict[str, object]
    """Maps a question's name to the answer; empty if the task was skipped."""
    seconds: object


def tasks(rows: Iterable[Mapping[str, str]]) -> list[dict[str, dict[str, str]]]:
    """Return a sheet's rows as tasks for Label Studio, with their texts only."""
    return [{"data": {name: row[name] for name in TEXTS}} for row in rows]


def labelling_config(ratings: Sequence[str], criteria: Sequence[AskedCriterion] = ()) -> str:
    """Return the project's labelling config (XML): the texts, the ratings, the criteria, flags and a comment."""
    lines = [
        "<View>",
        *(line for name in TEXTS[1:] for line in _text(name)),
        *_choices("rating", "Which reply would you rather receive?", {r: MEANINGS[r] for r in ratings}, required=True),
    ]
    for criterion in criteria:
        lines += _choices(criterion["name"], criterion["question"], {name: MEANINGS[name] for name in OF_CRITERIA})
    lines += _choices("flags", "Mark what is wrong, if anything", FLAGS, choice="multiple")
    lines += [
        '  <TextArea name="comment" toName="prompt" rows="2" maxSubmissions="1" placeholder="Comment"/>',
        "</View>",
    ]
    return "\n".join(lines) + "\n"


def _text(name: str) -> list[str]:
    title = {"prompt": "Conversation", "response_a": "Reply A", "response_b": "Reply B"}[name]
    return [f'  <Header value="{title}"/>', f'  <Text name="{name}" value="${name}"/>']


def _choices(
    name: str, question: str, choices: Mapping[str, str], choice: str = "single", required: bool = False
) -> list[str]:
    needed = ' required="true" requiredMessage="Choose one of the answers."' if required else ""
    return [
        f"  <Header value={quoteattr(question)}/>",
        f'  <Choices name={quoteattr(name)} toName="prompt" choice="{choice}" showInLine="true"{needed}>',
        *(f"    <Choice value={quoteattr(text)} alias={quoteattr(alias)}/>" for alias, text in choices.items()),
        "  </Choices>",
    ]


def instruction(guidelines: str) -> str:
    """Return guidelines as the project's expert instruction, which is HTML; HTML in the guidelines is escaped."""
    blocks = guideline_blocks(guidelines)
    return "\n".join(f"<{tag}>{html.escape(text, quote=False)}</{tag}>" for tag, text in blocks) + "\n"


def is_export(path: object, columns: Iterable[str]) -> bool:
    """Return whether a row with these fields is a task of Label Studio.

    Raises:
        UserError: it is a row of a flat export, which has one annotation per row.
    """
    if {*TEXTS, "annotator", "annotation_id"} <= set(columns):
        raise UserError(f"{path} is a flat export of Label Studio (CSV or JSON_MIN). Export the project as JSON.")
    return {"data", "annotations"} <= set(columns)


def sheet_rows(path: object, rows: Rows, mistakes: list[str]) -> Rows:
    """Return an export as rows of a sheet, one per item, with a column for each annotator.

    A row has the number of the item's first annotation. Added to `mistakes` are: an annotation without an annotator or
    a rating, several choices instead of one, a second annotation of an item by the same annotator, and an item whose
    annotations have different texts. Tasks without annotations and skipped ones add nothing.
    """
    annotations = [annotation for row in rows for annotation in _annotations(path, *row, mistakes)]
    names = sorted(
        {annotation.annotator for annotation in annotations},
        key=lambda name: (not name.isdigit(), int("0" + name) if name.isdigit() else 0, name),
    )
    raters = {name: str(n) for n, name in enumerate(names, 1)}
    items: dict[object, tuple[int, dict[str, object]]] = {}
    first_rows: dict[tuple[object, str], int] = {}
    for annotation in annotations:
        item, rater = annotation.data.get("item"), raters[annotation.annotator]
        where = f"{path}, row {annotation.row}, annotator {annotation.annotator}"
        if not isinstance(item, str):
            mistakes.append(f"{where}: the task has no text `item`, so Tether did not export it.")
            continue
        texts = {name: annotation.data.get(name) for name in TEXTS}
        row = items.setdefault(item, (annotation.row, texts | {PEOPLE: str(len(raters))}))[1]
        if (item, rater) in first_rows:
            mistakes.append(
                f"{where}: they rated {item[:40]} in row {first_rows[item, rater]} already. Delete one of the "
                "annotations."
            )
            continue
        first_rows[item, rater] = annotation.row
        if any(row[name] != text for name, text in texts.items()):
            mistakes.append(f"{where}: the texts of {item[:40]} are not those of its other annotations.")
        if not annotation.answers.get("rating"):
            mistakes.append(
                f"{where}: the annotation of {item[:40]} has no `rating`. Let them finish it, or delete it, and export "
                "again."
            )
            continue
        for question, answer in annotation.answers.items():
            if isinstance(answer, list) and len(answer) > 1 and question != "flags":
                mistakes.append(f"{where}: {len(answer)} answers to `{question}` where one was asked for.")
            else:
                row[f"{question}_{rater}"] = _alone(question, answer)
        row[f"seconds_{rater}"] = annotation.seconds
    return list(items.values())


def _alone(question: str, answer: object) -> object:
    value = answer[0] if isinstance(answer, list) and answer else answer
    meant = {rating_of(meaning): rating for rating, meaning in MEANINGS.items()}
    return meant.get(rating_of(value), value) if question != "comment" else value


def _annotations(path: object, number: int, row: Mapping[str, object], mistakes: list[str]) -> list[Annotation]:
    """Return the annotations of a task."""
    data, entries = row.get("data"), row["annotations"]
    if not isinstance(data, dict) or not isinstance(entries, list):
        mistakes.append(f"{path}, row {number}: a task of Label Studio has `data` and a list of `annotations`.")
        return []
    annotations = []
    for entry in entries:
        by = entry.get("completed_by") if isinstance(entry, dict) else None
        name = by.get("id") if isinstance(by, dict) else by
        if not isinstance(entry, dict) or not isinstance(entry.get("result"), list) or name in (None, ""):
            mistakes.append(f"{path}, row {number}: an annotation without `completed_by` or `result`. Export it again.")
        elif not entry.get("was_cancelled"):
            annotations.append(Annotation(number, data, str(name), _answers(entry["result"]), entry.get("lead_time")))
    return annotations


def _answers(results: Sequence[object]) -> dict[str, object]:
    answers: dict[str, object] = {}
    for result in results:
        value = result.get("value") if isinstance(result, dict) else None
        if isinstance(result, dict) and isinstance(value, dict):
            answers[str(result.get("from_name"))] = value.get("choices", value.get("text"))
    return answers
