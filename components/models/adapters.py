"""Several models on one frozen backbone: each is a LoRA adapter (Hu et al. 2022) on it, or the backbone itself.

The adapters are peft's layers, each of which can hold several adapters; files are in peft's format.
"""

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from components.base.errors import UserError, naming
from components.base.jsonl import write_json
from components.models.config import AdapterConfig
from components.models.matrices.quantized import hold, in_float32
from components.models.weights import check_finite, check_names, refusing

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

PARTS = ("lora_A", "lora_B")


class Backbone:
    """A frozen language or scalar-head model whose linear layers hold adapters, of which at most one is active.

    Its config, heads and device are the model's. It stays in eval mode.

    Args:
        model: in float32, on the device where it was loaded.
        dtype: format in which the linear layers below the head are stored. (With float32 weights `autocast` would
            compute the same rounded numbers at each use, and keep both copies.)
        quantize: `4bit` stores them in 4 bits instead (`AdapterConfig.quantize`).
        device: where to move it, layer by layer. None leaves it where it is.

    Raises:
        UserError: as for `components.models.matrices.quantized.four_bit`.
    """

    def __init__(
        self, model: Any, dtype: str = "float32", quantize: str | None = None, device: str | None = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.digest = tensors_digest(model.base_model.named_parameters())
        """sha256 of the float32 weights below the head. An adapter fits only the backbone with this digest."""
        hold(self.model, getattr(torch, dtype), quantize, device)
        self.configs: dict[str, AdapterConfig] = {}
        """Maps an adapter's name to its config, whose `targets` are the layers that it actually has."""
        self.layers: dict[str, LoraLayer] = {}
        """Maps a path in `model.base_model` to the adapted layer."""
        self._active: str | None = None

    def add(self, name: str, config: AdapterConfig, seed: int, score: nn.Module | None = None) -> "AdapterView":
        """Add an adapter with random A (from `seed`) and B = 0, so that it starts exactly as the backbone.

        Raises:
            UserError: a name in `config.targets` matches no layer of the model.
        """
        from peft import LoraConfig
        from peft.functional import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        targets = "all-linear" if config.targets is None else list(config.targets)
        transposed = any(isinstance(layer, Conv1D) for layer in self.model.base_model.modules())  # as in GPT-2
        lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, fan_in_fan_out=transposed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                inject_adapter_in_model(lora, self.model.base_model, name)
            except ValueError as error:
                raise UserError(f"lora.targets: {error}") from error
        del self.model.base_model.peft_config  # peft's record, which names the newest adapter only
        self.configs[name] = config.model_copy(update={"targets": tuple(sorted(lora.target_modules))})
        self.layers = {n: m for n, m in self.model.base_model.named_modules() if isinstance(m, LoraLayer)}
        for weight in self.adapter_weights(name).values():
            weight.data = weight.data.float()  # peft creates it in the backbone's format
        self._active = name
        for target in config.targets or ():  # peft raises only if all of them are unknown
            if not any(f"{target}.lora_A.weight" in key for key in self.adapter_weights(name)):
                raise UserError(f"lora.targets: the model has no linear layer named {target}.")
        return AdapterView(self, name, score)

    def activate(self, name: str | None) -> None:
        """Make adapter `name` the active one; None for the backbone alone.

        peft sets `requires_grad` only for the active adapter. Another model may be activated before the backward pass,
        which would silently drop the gradients of this one, so the `requires_grad` flags are kept as they were.
        """
        if name == self._active:
            return
        for layer in self.layers.values():
            flags = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
            layer.set_adapter([] if name is None else [name])
            for parameter, requires_grad in flags:
                parameter.requires_grad_(requires_grad)
        self._active = name

    def adapter_weights(self, name: str) -> dict[str, nn.Parameter]:
        """Return A (rank, in) and B (out, rank) of each layer of adapter `name`, by peft's names."""
        return {
            f"{path}.{part}.weight": getattr(layer, part)[name].weight
            for path, layer in self.layers.items()
            for part in PARTS
            if name in getattr(layer, part)
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of the model's own weights, without the adapters'."""
        adapters = {id(weight) for name in self.configs for weight in self.adapter_weights(name).values()}
        yield from ((name, p) for name, p in self.model.named_parameters() if id(p) not in adapters)


class AdapterView(nn.Module):
    """The backbone with one adapter active, or alone if `name` is None. It is used like a whole model.

    Its parameters are the adapter's and the head's: only these are trained, checkpointed and have optimiser state. The
    backbone is not a submodule.
    """

    def __init__(self, backbone: Backbone, name: str | None = None, score: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone, self.name = backbone, name
        weights = backbone.adapter_weights(name) if name is not None else {}
        self.adapter = nn.ParameterDict({key.replace(".", "_"): weight for key, weight in weights.items()})
        if score is not None:
            self.score = score

    @property
    def config(self) -> Any:
        """Return the backbone's config."""
        return self.backbone.model.config

    def base_model(self, **inputs: Any) -> Any:
        """Run the backbone below its head with this model's adapter."""
        self.backbone.activate(self.name)
        return self.backbone.model.base_model(**inputs)

    def get_output_embeddings(self) -> Any:
        """Return the backbone's output layer, which has no adapter."""
        return self.backbone.model.get_output_embeddings()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of all weights that its outputs depend on: backbone, adapter, head."""
        yield from self.backbone.weights()
        yield from self.named_parameters()

    @torch.no_grad()
    def merged(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return a whole model of the backbone's class with the adapter merged; the backbone itself is not changed.

        Quantised weights are merged at the values with which the backbone computes. If the class has no scalar head,
        this model's head is left out.

        Args:
            dtype: of the linear layers below the head; each is merged in float32 and then cast.
        """
        whole = copy.deepcopy(self.backbone.model)
        if "score" in self._modules and hasattr(whole, "score"):
            whole.score = copy.deepcopy(self.score)
        for path, layer in self.backbone.layers.items():
            adapted = whole.base_model.get_submodule(path)
            adapted.base_layer = in_float32(adapted.base_layer)
            if self.name is not None and self.name in layer.lora_A:
                adapted.merge(adapter_names=[self.name])
            whole.base_model.set_submodule(path, adapted.get_base_layer().to(dtype))
        for path, layer in list(whole.base_model.named_modules()):
            if isinstance(layer, nn.Linear) and path not in self.backbone.layers:
                whole.base_model.set_submodule(path, in_float32(layer).to(dtype))
        return whole.requires_grad_(False)

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        """Write the merged model like `save_pretrained` of transformers."""
        self.merged().save_pretrained(folder, **options)


def save_adapter(view: AdapterView, folder: Path) -> None:
    """Write the adapter and head of `view` in peft's format (no pickle), with the digest of their backbone.

    `PeftModel.from_pretrained` loads the folder onto the backbone.
    """
    assert view.name is not None, "the backbone alone has no adapter to write"
    folder.mkdir(parents=True, exist_ok=True)
    backbone, config = view.backbone, view.backbone.configs[view.name]
    tensors = {f"{_below(backbone)}{key}": weight for key, weight in backbone.adapter_weights(view.name).items()}
    head = getattr(view, "score", None)
    if head is not None:
        tensors[f"{_WHOLE}score.weight"] = head.weight
    with naming(file := folder / "adapter_model.safetensors"):
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, file)
    described = {"peft_type": "LORA", "r": config.rank, "lora_alpha": config.alpha, "target_modules": config.targets}
    of_kind = {"task_type": "CAUSAL_LM"} if head is None else {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    write_json(folder / "adapter_config.json", described | of_kind)
    write_json(folder / "backbone.json", {"sha256": backbone.digest})


def load_adapter(backbone: Backbone, name: str, folder: Path) -> AdapterView:
    """Load what `save_adapter` wrote, with its head, as adapter `name` of `backbone`.

    Raises:
        UserError: there is no adapter, it was trained on a different backbone, or its file lacks weights.
    """
    if not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"ppo.lora: {folder} is not an adapter: the reward model was trained whole and can't share the policy's "
            "backbone. Set reward.lora too, as in --set reward.lora.rank=8."
        )
    if json.loads((folder / "backbone.json").read_text())["sha256"] != backbone.digest:
        raise UserError(
            f"ppo.lora: the adapter in {folder} was trained on another model than the SFT model of this run. "
            "Train the reward model on this one, with reward.lora."
        )
    file = folder / "adapter_model.safetensors"
    config = json.loads((folder / "adapter_config.json").read_text())
    with refusing(file, "the artifact", "can't be read as safetensors"):
        tensors = load_file(file)
    check_finite(file, "the artifact", tensors)
    score = None
    if (head := tensors.get(f"{_WHOLE}score.weight")) is not None:
        score = nn.Linear(head.shape[1], head.shape[0], bias=False)
        score.weight = nn.Parameter(head.to(backbone.model.device))
    shape = AdapterConfig(rank=config["r"], alpha=config["lora_alpha"], targets=config["target_modules"])
    view = backbone.add(name, shape, seed=0, score=score)
    weights = {f"{_below(backbone)}{key}": weight for key, weight in backbone.adapter_weights(name).items()}
    wrong = {key for key in weights.keys() & tensors.keys() if weights[key].shape != tensors[key].shape}
    left = tensors.keys() - weights.keys() - {f"{_WHOLE}score.weight"}
    check_names(file, "the artifact", weights.keys() - tensors.keys(), left, wrong)
    with torch.no_grad():
        for key, weight in weights.items():
            weight.copy_(tensors[key])
    return view


_WHOLE = "base_model.model."
"""The prefix that peft puts before names of a whole model."""


def _below(backbone: Backbone) -> str:
    return f"{_WHOLE}{backbone.model.base_model_prefix}."


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the sha256 of the tensors' names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
