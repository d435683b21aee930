"""Combine several sources into one reward: scale each by its own SFT scores, then take the weighted sum."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from components.base.errors import UserError
from components.base.hashing import canonical_json, hash8
from components.base.jsonl import Message
from components.base.text import counted
from components.data.splits import SPLITS
from components.data.tables.published import has_split, read_split
from components.distributed import ranks
from components.models.chat.rendering import rendered_prompt
from components.models.runtime import Runtime
from components.reward.scoring import ScoreScale
from components.rewards.config import (
    FunctionReward,
    HttpReward,
    ModelReward,
    PipelineReward,
    PluginReward,
    RewardSource,
    VerifierReward,
)
from components.rewards.function import FunctionSource
from components.rewards.http import HttpSource
from components.rewards.model import ModelSource
from components.rewards.source import Parts, Replies, Source, total
from components.rewards.stored_scores import StoredScores
from components.rewards.verifiers import Verifier

Place = Callable[[int, Parts], Sequence[tuple[int, float]]]
"""Maps a response's number and the parts of its score to (token index, value) pairs."""


class WeightedScores(NamedTuple):
    """n scored responses."""

    total: Tensor
    """(n,) the weighted sum of the sources' scaled scores."""
    by_source: dict[str, Tensor]
    """(n,) scaled scores of each source, by name."""
    parts: Tensor | None
    """(n, T) the parts of the sum that fall on single tokens; None if no source gave parts or they were not wanted."""


class PromptColumns:
    """The other columns of the prompts' rows, in all splits of a validate artifact; without one there are none.

    A row is read on access; until then its prompt takes 8 bytes of memory.
    """

    def __init__(self, data: Path | None = None) -> None:
        paths = [] if data is None else [data / f"prompts.{name}" for name in SPLITS]
        self._splits = [read_split(path) for path in paths if has_split(path)]
        self._places = {
            hash8(canonical_json(row["prompt"])): (number, place)
            for number, rows in enumerate(self._splits) for place, row in enumerate(rows) if row.get("columns")
        }  # fmt: skip

    def replies(self, prompts: Sequence[Sequence[Message]], responses: Sequence[str]) -> Replies:
        """Return responses with their prompts and the columns of the prompts' rows."""
        return Replies(prompts, responses, [self._of(prompt) for prompt in prompts])

    def _of(self, prompt: Sequence[Message]) -> Mapping[str, Any]:
        place = self._places.get(hash8(canonical_json(prompt))) if self._places else None
        columns: Mapping[str, Any] = {} if place is None else self._splits[place[0]][place[1]]["columns"]
        return columns


INPUT = "rewards"
"""Prefix of the stage's inputs that are models' folders: `rewards/NAME`."""


@dataclass
class Rewards(AbstractContextManager["Rewards", None]):
    """The sources of `ppo.rewards`, opened. The first rank asks them; all ranks get the scores."""

    configs: Sequence[RewardSource]
    sources: Mapping[str, Source]
    """Opened sources by name, without the pipeline's own model. Empty on all ranks but the first."""
    columns: PromptColumns = field(default_factory=PromptColumns)
    units: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Shift and scale of each source, in the unit of its raw score; filled by `measure`."""
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(
        cls, configs: Sequence[RewardSource], inputs: Mapping[str, Path], runtime: Runtime, tokenizer: Any, folder: Path
    ) -> "Rewards":
        """Start and load the sources. Use the result as a context manager, which closes them.

        Args:
            inputs: the stage's inputs; `data` has the prompts' rows, `rewards/NAME` a model's folder.
            tokenizer: the policy's tokenizer.
            folder: the folder in which scores of HTTP scorers are kept for resuming.

        Raises:
            UserError: a source cannot be used.
        """
        sources = dict[str, Source]()
        with ExitStack() as stack:
            for config in configs if ranks.is_first() else ():
                opened = _opened(config, inputs, runtime, lambda prompt: rendered_prompt(tokenizer, prompt), folder)
                if opened is not None:
                    sources[config.name] = opened
                    stack.callback(opened.close)
            return cls(configs, sources, PromptColumns(inputs["data"]), _stack=stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def rewarding(self) -> list[RewardSource]:
        """Return the sources whose scores are in the reward: all except judges."""
        return [config for config in self.configs if not config.judge]

    def measure(
        self, pipeline: Tensor, prompts: Sequence[Sequence[Message]], responses: Sequence[str], unit: ScoreScale,
        ended: Sequence[bool] = (),
    ) -> ScoreScale:  # fmt: skip
        """Measure each source's shift and scale on SFT responses, and return the scale of the sources' weighted sum.

        If every scale is measured, the sum is scaled too, so that its standard deviation over SFT responses is 1. If
        some scale is set in the config, the sum is not scaled.

        Args:
            pipeline: (n,) raw scores of the pipeline's own model.
            unit: the scale of the pipeline's own model.
            ended: (n,) whether each response ended before the cap; empty if all did.

        Raises:
            UserError: a source gives every SFT response the same score.
        """
        raw = self._raw(self.configs, pipeline, prompts, responses, ended)[0].double()
        for config, scores in zip(self.configs, raw, strict=True):
            scale = float(scores.std()) if config.scale is None else config.scale
            if not scale > 0:
                raise UserError(
                    f"ppo.rewards: {config.source} gives each of {len(scores)} SFT responses the same score "
                    f"({float(scores[0]):g}), so its scale can't be measured. If that is intended, set its scale "
                    "(and shift) by hand, as in scale: 1."
                )
            self.units[config.name] = float(scores.mean()) if config.shift is None else config.shift, scale
        indices = [i for i, config in enumerate(self.configs) if not config.judge]
        total = self._sum(self._scaled(self.rewarding, raw[indices]))
        by_hand = any(source.scale is not None for source in self.rewarding)
        spread = float(total.std())
        if not by_hand and not spread > 0:
            raise UserError("ppo.rewards: the weighted sum is the same for every SFT response. Change the weights.")
        scale = 1.0 if by_hand else spread
        shift = 0.0 if by_hand else float(total.mean())
        low = float(((total - shift) / scale).quantile(0.01))
        return ScoreScale(
            shift=shift, scale=scale, missing_eos_score=low, temperature=unit.temperature, responses=len(total)
        )

    def score(
        self, pipeline: Tensor, prompts: Sequence[Sequence[Message]], responses: Sequence[str], judging: bool = False,
        place: Place | None = None, tokens: int = 0, ended: Sequence[bool] = (),
    ) -> WeightedScores:  # fmt: skip
        """Score responses, in float32 on the device of `pipeline`.

        Judges are asked only if `judging` is set, and are never in the sum.

        Args:
            place: finds the tokens of a score's parts, among T = `tokens` tokens; None returns no parts.
            ended: as for `measure`.
        """
        configs = [source for source in self.configs if judging or not source.judge]
        raw, by_config = self._raw(configs, pipeline, prompts, responses, ended)
        scaled = self._scaled(configs, raw)
        rewarded = [scores for config, scores in zip(configs, scaled, strict=True) if not config.judge]
        by_source = {config.name: scores for config, scores in zip(configs, scaled, strict=True)}
        parts = None
        if place is not None:
            parts = torch.zeros(len(responses), tokens, device=pipeline.device)
            for config in self.rewarding:
                for row, score in by_config.get(config.name, {}).items():
                    for token, value in place(row, score):
                        parts[row, token] += config.weight * value / self.units[config.name][1]
            ranks.joined(parts)
            parts = parts if bool((parts != 0).any()) else None
        return WeightedScores(self._sum(rewarded), by_source, parts)

    def _scaled(self, configs: Sequence[RewardSource], raw: Tensor) -> list[Tensor]:
        units = [self.units[config.name] for config in configs]
        return [(scores - shift) / scale for scores, (shift, scale) in zip(raw, units, strict=True)]

    def _sum(self, scaled: Sequence[Tensor]) -> Tensor:
        """Return Σ weight · scaled score over the sources that are in the reward, in their order."""
        return torch.stack([config.weight * s for config, s in zip(self.rewarding, scaled, strict=True)]).sum(0)

    def _raw(
        self, configs: Sequence[RewardSource], pipeline: Tensor, prompts: Sequence[Sequence[Message]],
        responses: Sequence[str], ended: Sequence[bool],
    ) -> tuple[Tensor, dict[str, dict[int, Parts]]]:  # fmt: skip
        """Return raw scores (K, n) of these sources, float32 on the device of `pipeline`, equal on all ranks. On the
        first rank also return the scores' parts, by source and response."""
        raw = torch.zeros(len(configs), len(responses))
        parts = dict[str, dict[int, Parts]]()
        if ranks.is_first():
            replies = self.columns.replies(prompts, responses)._replace(ended=ended)
            for place, config in enumerate(configs):
                source = self.sources.get(config.name)
                if source is None:
                    raw[place] = pipeline.float().cpu()
                    continue
                scores = source.score(replies)
                raw[place] = torch.tensor([total(score) for score in scores])
                parts[config.name] = {row: score for row, score in enumerate(scores) if isinstance(score, list)}
        raw = raw.to(pipeline.device)
        ranks.joined(raw)
        return raw, parts


def check_waits(configs: Sequence[RewardSource], runtime: Runtime, responses: int) -> None:
    """Check that the sources may not take longer than the ranks wait for the first one, which asks them in turn.

    Args:
        responses: the most that are scored at once.

    Raises:
        UserError: they may, so slow sources would end the stage as a rank that does not answer.
    """
    if runtime.ranks == 1:
        return
    waits = dict[str, float]()
    for config in configs:
        if isinstance(config, FunctionReward | PluginReward):
            waits[f"{config.source} (timeout)"] = config.timeout
        elif isinstance(config, HttpReward):
            requests = math.ceil(responses / config.batch_size)
            longest = f"{config.source} (patience, and the timeout of {counted(requests, 'request')})"
            waits[longest] = config.patience + requests * config.timeout
    if (together := sum(waits.values())) >= runtime.rank_timeout:
        raise UserError(
            f"ppo.rewards: {', '.join(waits)} may take {together:g} s for {responses} responses, one after the other, "
            f"and ranks wait {runtime.rank_timeout:g} s for each other (runtime.rank_timeout). Raise "
            "runtime.rank_timeout above it, or lower a timeout or patience."
        )


def agreement(scaled: Mapping[str, Tensor]) -> float | None:
    """Return the lowest Spearman rank correlation between two sources' scores (n,); None if none is defined."""
    varied = [scores.cpu().numpy() for scores in scaled.values() if len(scores) > 1 and float(scores.std()) > 0]
    correlations = [float(spearmanr(a, b).statistic) for a, b in itertools.combinations(varied, 2)]
    return float(np.min(correlations)) if correlations else None


def source_metrics(scaled: Mapping[str, Tensor], group: str) -> dict[str, float]:
    """Return `GROUP/reward_NAME`, each source's mean scaled score, and `GROUP/reward_rank_correlation`."""
    lowest = agreement(scaled)
    means = {f"{group}/reward_{name}": float(scores.mean()) for name, scores in scaled.items()}
    return means | ({} if lowest is None else {f"{group}/reward_rank_correlation": lowest})


def _opened(
    config: RewardSource, inputs: Mapping[str, Path], runtime: Runtime, render: Callable[[Any], str], folder: Path
) -> Source | None:
    match config:
        case PipelineReward():
            return None
        case ModelReward():
            return ModelSource(config, inputs[f"{INPUT}/{config.name}"], runtime)
        case FunctionReward() | PluginReward():
            return FunctionSource(config)
        case HttpReward():
            return StoredScores(HttpSource(config, render), folder / f"{config.name}.jsonl")
        case VerifierReward():
            return Verifier(config)
