"""A stage that only gathers a sharded policy's weights as they are sent to a server, and counts what is whole."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.base.observe import Observe
from components.base.settings import Settings
from components.models.runtime import Runtime


class SendingJob(Settings):
    """What is needed to load the policy."""

    runtime: Runtime


def run(job: SendingJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Return the most parameters that were whole at a time, which ranks have all at the end, and how many differ."""
    import torch

    from components.distributed import ranks, sharding
    from components.models.folders import load_causal_lm
    from components.rollouts.transfer import weights_on_first

    model, _ = load_causal_lm(inputs["sft"], job.runtime)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    sharding.spread(model, job.runtime.sharding, job.runtime.device, job.runtime.dtype)
    assert all(sharding.is_spread(weight) for weight in model.parameters())
    with torch.no_grad():  # as an evaluation leaves it: gathered, unless `weights_on_first` frees that
        sharding.through(model, lambda model, ids: model(ids), torch.tensor([[3, 4]]))
    gathered, most, gather = list[Any](), 0, sharding.whole

    def counted(tensor: Any) -> Any:
        nonlocal most
        whole = gather(tensor)
        assert sharding.is_spread(tensor), "this rank had more than its part"
        gathered.append(weakref.ref(whole))
        most = max(most, sum(reference() is not None for reference in gathered))
        return whole

    sharding.whole = counted
    weights = weights_on_first(model, torch.float32)
    sharding.whole = gather
    differing = sum(not torch.equal(weights[name], weight) for name, weight in expected.items()) if weights else 0
    sent = [0.0] * ranks.size()
    sent[ranks.rank()] = float(len(weights) == len(expected))
    of_ranks = ranks.summed({f"rank {rank}": number for rank, number in enumerate(sent)})
    highest = ranks.largest([float(most), float(differing)])
    ranks.go_on_alone()
    return {"most": highest[0], "differing": highest[1], **of_ranks}
