"""Which files a task of the harness is made of, and which YAML is refused."""

from pathlib import Path

import pytest

from components.base.errors import UserError
from components.evaluation.task_files import read_task_files, renamed
from tests.components.evaluation.local_tasks import write_task


def test_a_tasks_inputs_are_its_yaml_then_data_then_code(tmp_path: Path) -> None:
    yaml = write_task(tmp_path)
    (tmp_path / "base.yaml").write_text("doc_to_text: !function words.text\noutput_type: generate_until\n")
    (tmp_path / "words.py").write_text(
        "import more\ndef text(doc): return doc['question']\ndef docs(data): return data\n"
    )
    (tmp_path / "more.py").touch()
    yaml.write_text(yaml.read_text() + "include: base.yaml\nprocess_docs: !function words.docs\n")
    files = read_task_files(yaml)
    names = {name: path.name for name, path in files.items()}
    assert names == {"tasks/sums": "sums.yaml", "tasks/sums/1": "sums.jsonl", "tasks/sums/2": "more.py",
                     "tasks/sums/3": "words.py", "tasks/sums/4": "base.yaml"}  # fmt: skip


def test_data_are_found_in_the_current_folder_first_and_then_beside_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = write_task(tmp_path / "tasks")
    assert read_task_files(yaml)["tasks/sums/1"] == tmp_path / "tasks" / "sums.jsonl"
    (tmp_path / "sums.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    assert read_task_files(yaml)["tasks/sums/1"] == tmp_path / "sums.jsonl"


def test_data_files_keep_their_splits_and_order() -> None:
    named = {"train": ["a", "b"], "test": "c"}
    numbers = iter("123")
    assert renamed(named, lambda name: name + next(numbers)) == {"train": ["a1", "b2"], "test": "c3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("task: sums", "task: [sums, more]"), r"does not describe one task: its `task` is \['sums', 'more'\]"),
        (("task: sums", "task: a/b"), "letters, digits"),
        (("task: sums", "task: .."), "at most 64 letters"),
        (("task: sums", "custom_dataset: !function words.load\ntask: sums"), "there is no module words"),
        (("task: sums", "custom_dataset: more\ntask: sums"), "has a custom_dataset, whose files a key can't name"),
        (("task: sums", "doc_to_text: !function words\ntask: sums"), "names no function: write !function MODULE"),
        (("{test: sums.jsonl}", "&all [*all]"), "data_files holds itself"),
        (("task: sums", "task: [sums"), "can't be read as YAML: .*line 2"),
        (("task: sums", "include: gone.yaml\ntask: sums"), r"gone.yaml can't be read: No such file .*Correct the name"),
        (("task: sums", "include: sums.yaml\ntask: sums"), "includes sums.yaml a second time"),
        (("dataset_path: json", "dataset_path: allenai/arc"), r"draws its data from a hub \(dataset_path: allenai/arc"),
        (("sums.jsonl", "https://host/sums.jsonl"), "names the data file https://host/sums.jsonl. Name single files"),
        (("sums.jsonl", "s*.jsonl"), "Name single files"),
        (("sums.jsonl", "gone.jsonl"), "names the data file gone.jsonl, and there is none"),
    ],
)
def test_a_yaml_that_is_no_local_task_is_refused(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    yaml = write_task(tmp_path)
    assert change[0] in yaml.read_text()
    yaml.write_text(yaml.read_text().replace(*change, 1))
    with pytest.raises(UserError, match=message) as refused:
        read_task_files(yaml)
    assert str(refused.value).startswith(f"evaluation.tasks: {tmp_path}")


def test_a_yaml_without_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UserError, match="holds no task"):
        read_task_files(tmp_path / "empty.yaml")


def test_no_file_outside_the_allowed_folders_is_read(tmp_path: Path) -> None:
    yaml = write_task(tmp_path / "tasks")
    (tmp_path / "secret.txt").write_text("password: [s3cret\n")
    yaml.write_text(yaml.read_text() + "include: ../secret.txt\n")

    def allow(file: Path) -> None:
        if not file.resolve().is_relative_to(tmp_path / "tasks"):
            raise UserError(f"{file} is outside")

    with pytest.raises(UserError, match=r"secret\.txt is outside"):
        read_task_files(yaml, allow)
