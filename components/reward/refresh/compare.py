"""Refresh an earlier run's reward model: choose its training pairs, and measure what it forgot of the old ones.

The old pairs are those of the earlier run's data. If that run's reward model was itself refreshed, they include the old
pairs that it used: its artifact has a folder `previous/` with the pairs that it replayed, those on which it was
compared, and all prompts of the runs before it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr

from components.base.errors import UserError
from components.base.hashing import hash8
from components.base.jsonl import write_json, write_rows
from components.data.rows import CanonicalRow
from components.data.splits import SPLITS, loose_key, prompt_key
from components.data.tables.joined import JoinedRows, JsonlRows, keys_of
from components.data.tables.published import read_split, rows_at
from components.data.words import seen
from components.reward.config import BINS, RefreshConfig, RewardJob
from components.reward.evaluation.probes import ProbeTexts
from components.reward.pair_scores import score_pairs
from components.reward.refresh.previous import check_previous
from components.reward.scoring import ScoreScale, load_scorer, score_sequences
from components.reward.training_pairs import PreferencePair, encode_pairs
from components.stats.calibration.calibration_metrics import calibration, correctness
from components.stats.calibration.nulls import Judgements
from components.stats.intervals import cluster_codes, gain_in_shares
from components.training.loop import seeded

Prompts = Mapping[str, Sequence[CanonicalRow]]
"""Maps a split to rows of which only the prompt is used."""

KEPT = "previous"
"""The folder of a refreshed artifact with the old pairs and prompts."""


class Refresh(NamedTuple):
    """The data of a refresh. Rows are read on access; memory holds 8 to 24 bytes for each."""

    previous: Path
    """The earlier run's reward artifact."""
    splits: dict[str, Sequence[PreferencePair]]
    """This run's pairs by split: its own without leaks, and the replayed ones."""
    old: dict[str, Sequence[PreferencePair]]
    """The earlier run's pairs by split."""
    prompts: dict[str, Sequence[CanonicalRow]]
    """A row with each prompt of every earlier run, by the split in which it was."""
    replay: Sequence[PreferencePair]
    """The pairs of `old` that are trained on again."""
    left_out: int
    """How many of this run's own pairs leaked."""

    @classmethod
    def begin(
        cls, job: RewardJob, config: RefreshConfig, inputs: Mapping[str, Path],
        new: Mapping[str, Sequence[PreferencePair]],
    ) -> "Refresh":  # fmt: skip
        """Check the earlier model, and choose the pairs of a run whose data has the pairs `new`.

        Raises:
            UserError: as for `check_previous` and `without_leaks`.
        """
        check_previous(job.reward, inputs["sft"], inputs["previous_reward"])
        new = {split: JoinedRows([rows]) for split, rows in new.items()}
        voted = Voted.of(new["train"])
        earlier_prompts = voted.released(known_prompts(inputs["previous_reward"]))
        old = voted.released(old_pairs(inputs, earlier_prompts))
        prompts: dict[str, Sequence[CanonicalRow]] = {
            split: _last_of_each(_joined(earlier_prompts[split], old[split]), loose) for split in SPLITS
        }
        splits = without_leaks(new, prompts)
        left_out = sum(len(new[split]) - len(rows) for split, rows in splits.items())
        splits["train"], earlier = voted.parted(splits["train"])
        before = _last_of_each(_joined(old["train"], earlier), pair_key)  # most are in both
        replay = replayed(config, job.seed, splits["train"], not_held_out(before, prompts))
        splits["train"] = _joined(splits["train"], replay)
        return cls(inputs["previous_reward"], splits, old, prompts, replay, left_out)

    def compare(
        self, job: RewardJob, model: Any, tokenizer: Any, samples: ProbeTexts, scale: ScoreScale, artifact: Path
    ) -> dict[str, float]:
        """Compare both models on the old pairs, and write the result and the pairs for the next refresh to `artifact`.

        Args:
            model: the new model, for an ensemble the combined one.
            samples: the SFT responses on which `scale`, the new model's, was measured.

        Returns:
            Metrics; one that is unknown is NaN, so that its gate fails. In `refresh.json` are: the calibration of both
            models (`previous`, `new`), each at its own temperature; `gain`, the new accuracy minus the earlier one,
            paired, with its 95 % interval clustered by prompt; `right_to_wrong` and `wrong_to_right`, the shares of
            pairs whose order flipped; `correlation` (Pearson) of the scores of all responses; how many pairs were
            `replayed` and `left_out`; and `scale`: the earlier model's as published (`then`), both models' on this
            run's SFT responses, the new one divided by the earlier one (`ratio`), and the rise of the shift in units of
            the earlier one (`shift_change`).
        """
        then, test, pad_id = ScoreScale.read(self.previous), self.old["test"], tokenizer.pad_token_id
        old_model = load_scorer(self.previous, job.runtime)[0]
        encoded = encode_pairs(tokenizer, test, job.generation, folder=artifact.parent)
        clusters = cluster_codes(hash8(prompt_key(row["prompt"])) for row in test).tolist()
        before, after = (score_pairs(scorer, pad_id, encoded, job.runtime) for scorer in (old_model, model))
        was, is_ = (correctness(scores[0] - scores[1]) for scores in (before, after))
        judgements = Judgements.of(test, clusters)
        models = {
            name: calibration(scores[0] - scores[1], clusters, temperature, job.seed, BINS, judgements=judgements)
            for name, scores, temperature in (("previous", before, then.temperature), ("new", after, scale.temperature))
        }
        here = ScoreScale.measure(score_sequences(old_model, pad_id, samples.ids, job.runtime), then.temperature)
        numbers = gain_in_shares(is_, was, clusters).named("gain") | {
            "right_to_wrong": float(((was == 1) & (is_ == 0)).mean()),
            "wrong_to_right": float(((was == 0) & (is_ == 1)).mean()),
            "correlation": float(pearsonr(before.ravel(), after.ravel()).statistic),
            "replayed": len(self.replay),
            "left_out": self.left_out,
        }
        ratio, change = scale.scale / here.scale, (scale.shift - here.shift) / here.scale
        scales = {
            name: {"shift": of_model.shift, "scale": of_model.scale}
            for name, of_model in (("then", then), ("previous", here), ("new", scale))
        }
        document = {name: of_model.document() for name, of_model in models.items()} | numbers
        write_json(artifact / "refresh.json", document | {"scale": scales | {"ratio": ratio, "shift_change": change}})
        for split, rows in (("train", self.replay), ("test", test)):
            write_rows(artifact / KEPT / f"pairs.{split}.jsonl", rows)
        for split, prompts in self.prompts.items():
            write_rows(artifact / KEPT / f"prompts.{split}.jsonl", ({"prompt": row["prompt"]} for row in prompts))
        numbers |= {"scale_ratio": ratio, "shift_change": change}
        for name in ("accuracy", "brier", "ece"):
            numbers |= {name: models["new"].numbers[name], f"{name}_previous": models["previous"].numbers[name]}
        numbers["test_pairs"] = len(test)
        return {f"reward/refresh_{name}": np.nan if value is None else float(value) for name, value in numbers.items()}


class Voted(NamedTuple):
    """The pairs of a run's training data that people judged in earlier rounds; empty if there are none."""

    pairs: NDArray[np.uint64]
    """Keys (`pair_key`) of the judged pairs."""
    prompts: NDArray[np.uint64]
    """Keys (`loose`) of their prompts, which are no longer in the held-out sets."""

    @classmethod
    def of(cls, train: Sequence[PreferencePair]) -> "Voted":
        """Find those among a run's training pairs."""
        rows = rows_at(train, [place for place, row in enumerate(train) if "judged_in" in row])
        return cls(_keys(rows, pair_key), _keys(rows, loose))

    def released(self, old: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Return earlier runs' rows without those that were held out there and whose prompt is now trained on."""
        if not len(self.prompts):
            return dict(old)
        return {
            split: rows if split == "train" else _where(rows, ~np.isin(_keys(rows, loose), self.prompts))
            for split, rows in old.items()
        }

    def parted(self, rows: Sequence[PreferencePair]) -> tuple[Sequence[PreferencePair], Sequence[PreferencePair]]:
        """Split training pairs into new ones and earlier ones, of which only a share is replayed.

        If people judged pairs in earlier rounds, only these count as new: among thousands of pairs that the earlier
        model has already learned, a few hundred would have little effect. Otherwise all pairs are new.
        """
        if not len(self.pairs):
            return rows, []
        new = np.isin(_keys(rows, pair_key), self.pairs)
        return _where(rows, new), _where(rows, ~new)


def known_prompts(reward: Path) -> dict[str, Sequence[CanonicalRow]]:
    """Return rows, by split, with the prompts of all runs before that of a reward artifact; empty if it was not
    refreshed.

    (Artifacts of earlier versions lack these prompts; for them, return the prompts of the old pairs that they hold.)
    """
    return {split: _joined(_kept(reward, "prompts", split), _kept(reward, "pairs", split)) for split in SPLITS}


def old_pairs(inputs: Mapping[str, Path], prompts: Prompts) -> dict[str, Sequence[PreferencePair]]:
    """Return the old pairs by split: those of `inputs["previous_data"]`, and those in `inputs["previous_reward"]`.

    Pairs that leak into another split of `prompts`, the prompts of still earlier runs, are left out, as in that run.
    """
    data = {split: JoinedRows([read_split(inputs["previous_data"] / f"pairs.{split}")]) for split in SPLITS}
    out: dict[str, Sequence[PreferencePair]] = {}
    for split, rows in without_leaks(data, prompts).items():
        before = _kept(inputs["previous_reward"], "pairs", split)
        if len(before):
            rows = _joined(rows, _where(before, ~np.isin(_keys(before, pair_key), _keys(rows, pair_key))))
        out[split] = rows
    return out


def _kept(reward: Path, what: str, split: str) -> Sequence[Any]:
    file = reward / KEPT / f"{what}.{split}.jsonl"
    return JoinedRows([JsonlRows(file)] if file.is_file() else [])


def _joined(*parts: Sequence[Any]) -> JoinedRows:
    return JoinedRows([part if isinstance(part, JoinedRows) else JoinedRows([part]) for part in parts])


def without_leaks(new: Mapping[str, Sequence[PreferencePair]], old: Prompts) -> dict[str, Sequence[PreferencePair]]:
    """Return `new` by split, without the pairs whose prompt is in another split of `old`.

    Training on a prompt of the old test split would inflate the new model's accuracy there. Testing or calibrating on a
    prompt on which the old model was trained would inflate it here. Prompts that differ only in case, punctuation or
    white space are the same. A prompt's split is a function of its text, so if `data.split` is equal in both runs, only
    such near-duplicates leak.

    Raises:
        UserError: a split is left without pairs.
    """
    stood = {split: np.unique(_keys(rows, loose)) for split, rows in old.items() if len(rows)}
    out: dict[str, Sequence[PreferencePair]] = {}
    for split, rows in new.items():
        others = [keys for other, keys in stood.items() if other != split]
        elsewhere = np.isin(_keys(rows, loose), np.concatenate(others)) if others else np.zeros(len(rows), bool)
        out[split] = _where(rows, ~elsewhere)
    for split, rows in out.items():
        if not len(rows):
            raise UserError(
                f"pairs.{split}: each of its {len(new[split])} rows, from row 1 on, has a prompt from another "
                "split of the run in reward.refresh.from_run. Held-out pairs must not become training pairs, nor the "
                "reverse. Set data.split as in that run, or give pairs with other prompts."
            )
    return out


def replayed(
    config: RefreshConfig, seed: int, new: Sequence[PreferencePair], old: Sequence[PreferencePair]
) -> Sequence[PreferencePair]:
    """Choose the old training pairs to mix into `new`, so that they are a share `config.replay` of the whole.

    Old pairs that were judged again are not replayed; the new judgement replaces them.
    """
    rows = _where(old, ~np.isin(_keys(old, pair_key), _keys(new, pair_key)))
    wanted = min(len(rows), round(len(new) * config.replay / (1 - config.replay)))
    return rows_at(rows, sorted(seeded(seed, "reward", "replay").sample(range(len(rows)), wanted)))


def not_held_out(rows: Sequence[PreferencePair], old: Prompts) -> Sequence[PreferencePair]:
    """Return `rows` without those whose prompt, or a near-duplicate, is in the calibration or test split of `old`."""
    held_out = np.concatenate([_keys(old[split], loose) for split in ("calibration", "test")])
    return _where(rows, ~np.isin(_keys(rows, loose), held_out))


def loose(row: CanonicalRow) -> bytes:
    """Return the key of a prompt without its case, punctuation and white space."""
    return hash8(loose_key(row["prompt"]))


def pair_key(row: CanonicalRow) -> bytes:
    """Return the key of a pair's prompt and its two responses, whichever won."""
    return hash8("\0".join((prompt_key(row["prompt"]), *sorted(map(seen, (row["chosen"], row["rejected"]))))))


def _keys(rows: Sequence[Any], key: Callable[[CanonicalRow], bytes]) -> NDArray[np.uint64]:
    """Return the keys (n,) of rows."""
    return rows.keys(key.__name__, key) if isinstance(rows, JoinedRows) else keys_of(iter(rows), key)


def _where(rows: Sequence[Any], keep: NDArray[np.bool_]) -> Sequence[Any]:
    return rows_at(rows, np.flatnonzero(keep).tolist())


def _last_of_each(rows: JoinedRows, key: Callable[[CanonicalRow], bytes]) -> JoinedRows:
    keys = _keys(rows, key)
    _, first = np.unique(keys, return_index=True)
    _, last = np.unique(keys[::-1], return_index=True)
    return rows.choose((len(keys) - 1 - last)[np.argsort(first)])
