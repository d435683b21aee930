import json
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.data.config import DataConfig, HubConfig
from components.data.hub import resolve_source
from components.data.readers import read_source
from tests.waiting import PATIENCE

datasets = pytest.importorskip("datasets")
COMMITS = {None: "1" * 40, "v1": "2" * 40}
ROWS = [{"prompt": "a", "chosen": "x", "rejected": "y"}, {"prompt": "b", "chosen": "x", "rejected": "y"}]


@pytest.fixture(autouse=True)
def commits(monkeypatch):
    """The hub's commits by revision; None is the default branch."""
    found = dict(COMMITS)
    info = staticmethod(lambda name, revision: SimpleNamespace(sha=found[revision]))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    return found


def stand_in(monkeypatch, load=lambda *_, **__: datasets.Dataset.from_list(ROWS)):
    """Let `load(name, subset, split, revision, streaming)` return the hub's datasets; returns the list of its calls."""
    asked = []

    def load_asked(name, subset, split, revision, streaming):
        asked.append((name, subset, split, revision, streaming))
        return load(name, subset, split, revision, streaming)

    def builder(name, subset, revision):
        give = partial(load_asked, name, subset, revision=revision)
        return SimpleNamespace(
            hash=revision,
            download_and_prepare=lambda: None,
            as_dataset=partial(give, streaming=False),
            as_streaming_dataset=partial(give, streaming=True),
        )

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    return asked


def test_a_path_that_exists_is_itself(tmp_path):
    path = tmp_path / "owner" / "name"
    path.parent.mkdir()
    path.write_text("{}")
    assert resolve_source(str(path), HubConfig(), tmp_path / "cache", "data.preferences") == path


@pytest.mark.parametrize("value", ["data/pairs.jsonl", "/no/such/file", "pairs", "data/deep/pairs"])
def test_a_missing_path_is_refused_without_asking_the_hub(tmp_path, monkeypatch, value):
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match=r"data\.preferences: there is no file"):
        resolve_source(value, HubConfig(), tmp_path, "data.preferences")


@pytest.mark.timeout(PATIENCE * 20)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("/dev/zero", "a device, a pipe or a socket"),
        ("pipe", "a device, a pipe or a socket"),
        ("", r"the path is empty; is a shell variable not set\?"),
        ("a" * 5000, "can't be opened: File name too long"),
        ("a\0b", "can't be opened: embedded null byte"),
        ("~nobody-of-that-name/x", "can't be opened: Could not determine home directory"),
    ],
)
def test_what_can_not_be_read_to_an_end_or_be_a_path_is_refused_by_its_field(tmp_path, monkeypatch, value, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(UserError, match=rf"data\.preferences.*{said}") as error:
        resolve_source(value, HubConfig(), tmp_path, "data.preferences")
    assert len(str(error.value)) < 400


def test_a_hub_that_cannot_be_reached_is_said_in_one_paragraph(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nand much more")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(
        UserError, match=r"'owner/name' is no file here.*can't be loaded: Couldn't reach the Hub\."
    ) as error:
        resolve_source("owner/name", HubConfig(), tmp_path, "data.preferences")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_hub_dataset_is_fetched_once_and_then_read_as_a_file(tmp_path, monkeypatch):
    asked = stand_in(monkeypatch)
    hub = HubConfig(subset="helpful", split="test", revision="v1")
    cache = tmp_path / "home" / "datasets"  # a new home has no folder for it yet
    first, again = (resolve_source("owner/name", hub, cache, "data.preferences") for _ in range(2))
    assert first == again and asked == [("owner/name", "helpful", "test", COMMITS["v1"], False)]
    assert [row.data for row in read_source(first)] == ROWS
    other = resolve_source("owner/name", HubConfig(split="train"), cache, "data.preferences")
    assert other != first


def test_a_hub_dataset_is_of_one_commit_though_its_branch_moves_and_the_copy_is_lost(tmp_path, monkeypatch, commits):
    asked = stand_in(monkeypatch)
    first = resolve_source("owner/name", HubConfig(), tmp_path, "data.preferences")
    assert first.with_suffix(".commit").read_text() == f"{COMMITS[None]}\n"
    commits[None] = "3" * 40
    first.unlink()
    assert resolve_source("owner/name", HubConfig(), tmp_path, "data.preferences") == first
    assert [revision for *_, revision, _ in asked] == [COMMITS[None]] * 2
    resolve_source("owner/name", HubConfig(split="test"), tmp_path, "data.preferences")
    assert asked[2][3] == "3" * 40, "what was never read has no commit yet"


def test_a_stream_is_written_down_row_by_row_and_one_that_breaks_off_leaves_no_file(tmp_path, monkeypatch):
    def rows(broken):
        yield from ROWS
        if broken:
            raise ConnectionError("the connection was lost")

    def load(name, subset, split, revision, streaming):
        assert streaming
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"broken": name == "owner/broken"})

    stand_in(monkeypatch, load)
    hub = HubConfig(streaming=True)
    found = resolve_source("owner/name", hub, tmp_path, "data.preferences")
    assert [row.data for row in read_source(found)] == ROWS
    with pytest.raises(UserError, match=r"data\.preferences: 'owner/broken'.*can't be loaded: the connection was lost"):
        resolve_source("owner/broken", hub, tmp_path, "data.preferences")
    assert list(tmp_path.glob("*.jsonl")) == [found]


def cached(cache, commit, answer):
    """Write an entry for dataset owner/name at `commit` into `cache`, the cache of `datasets`."""
    source = cache / "rows.jsonl"
    source.write_text(json.dumps({**ROWS[0], "chosen": answer}) + "\n")
    builder = datasets.load_dataset_builder("json", data_files=str(source), cache_dir=str(cache / "made"))
    builder.download_and_prepare()
    entry = cache / "owner___name" / "default" / "0.0.0" / commit
    shutil.copytree(builder.cache_dir, entry)
    (entry / "json-train.arrow").rename(entry / "name-train.arrow")
    info = json.loads((entry / "dataset_info.json").read_text())
    (entry / "dataset_info.json").write_text(json.dumps(info | {"config_name": "default", "dataset_name": "name"}))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_commit_in_the_cache_of_datasets_is_read_offline_and_another_commit_is_not_taken_for_it(
    tmp_path, monkeypatch, streaming
):
    """`datasets` gives the newest entry of its cache when the hub fails, whatever the revision."""

    def offline(*args, **kwargs):
        raise ConnectionError("offline mode is enabled")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", offline)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    home, asked = tmp_path / "home", "data.preferences"
    hubs = [HubConfig(revision=COMMITS[name], streaming=streaming) for name in (None, "v1")]
    (tmp_path / "cache").mkdir()
    with pytest.raises(UserError, match=r"offline mode is enabled.*give the full commit.* as data\.hub\.revision if"):
        resolve_source("owner/name", HubConfig(), home, asked)
    cached(tmp_path / "cache", COMMITS["v1"], "of v1")
    found = resolve_source("owner/name", hubs[1], home, asked)
    assert [row.data["chosen"] for row in read_source(found)] == ["of v1"]
    assert found.with_suffix(".commit").read_text() == f"{COMMITS['v1']}\n"
    with pytest.raises(UserError, match=rf"the newest copy in the cache of `datasets` is not {COMMITS[None]}\."):
        resolve_source("owner/name", hubs[0], home, asked)
    assert list(home.glob("*.jsonl")) == [found]


def test_dates_of_a_hub_dataset_and_text_that_is_no_utf8_are_written_as_text(tmp_path, monkeypatch):
    import pyarrow as pa

    wrong = pa.Array.from_buffers(pa.utf8(), 2, pa.array([b"ok", b"\xff\xfe"]).buffers())
    noted = pa.array([0, 2**62], pa.timestamp("us"))
    dataset = datasets.Dataset(pa.table({"prompt": ["a", "b"], "chosen": wrong, "noted": noted}))
    stand_in(monkeypatch, lambda *_, **__: dataset)
    rows = list(read_source(resolve_source("owner/name", HubConfig(), tmp_path, "data.preferences")))
    assert [row.data["chosen"] for row in rows] == ["ok", "\udcff\udcfe"]
    assert [row.data["noted"] for row in rows] == ["1970-01-01 00:00:00", "a timestamp[us] that can't be read"]


def test_a_folder_saved_by_datasets_is_read(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "several"))
    assert [(row.number, row.data) for row in read_source(tmp_path / "one")] == [(1, ROWS[0]), (2, ROWS[1])]
    assert len(list(read_source(tmp_path / "several", split="dev"))) == 2
    with pytest.raises(UserError, match="no split 'train', only dev"):
        list(read_source(tmp_path / "several"))


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(UserError, match="none written by datasets' save_to_disk"):
        list(read_source(tmp_path))


def test_two_runs_that_fetch_the_same_dataset_at_once_both_get_all_of_it(tmp_path, monkeypatch):
    whole = []

    def load(name, subset, split, revision, streaming):
        return iter(ROWS) if whole else rows()

    def rows():
        yield ROWS[0]
        whole.append(None)
        whole.append(resolve_source("owner/name", HubConfig(), tmp_path, "data.preferences").read_bytes())
        yield ROWS[1]

    stand_in(monkeypatch, load)
    fetched = resolve_source("owner/name", HubConfig(), tmp_path, "data.preferences")
    assert fetched.read_bytes() == whole[1] and len(list(read_source(fetched))) == 2
    assert {path.name for path in tmp_path.iterdir()} == {fetched.name, fetched.with_suffix(".commit").name}


def test_another_split_of_a_saved_folder_is_another_key():
    keys = [keyed_values(DataConfig(hub=HubConfig(split=split, subset="s"))) for split in ("train", "dev")]
    assert keys[0] != keys[1] and keys[0]["hub"] == {"split": "train"}
