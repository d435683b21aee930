"""That a model's folder has its weights in safetensors (or GGUF): no library may read a pickle in it on our behalf.

`use_safetensors=True` makes transformers refuse a folder with only pytorch_model.bin. It still reads a pickle where an
index names one as a shard, and where an adapter lies beside the model (transformers 5.23, peft 0.21).
"""

import json
from pathlib import Path

from components.base.errors import UserError


def check_weights(folder: Path, named_by: str) -> None:
    """See that whatever is loaded from `folder`, which the option `named_by` names, is safetensors or GGUF in it.

    Raises:
        UserError: it holds no such weights, or names others.
    """
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not any(name.endswith((".safetensors", ".gguf")) for name in files):
        pickles = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
        only = (
            f", only {', '.join(pickles)}, which may run code when read. Convert it to safetensors" if pickles else ""
        )
        raise UserError(f"{named_by}: {folder} holds no model.safetensors{only}.")
    if "adapter_config.json" in files:
        raise UserError(
            f"{named_by}: {folder} holds an adapter beside the model, which would be loaded onto it unasked. Merge it "
            f"into the model (peft: merge_and_unload), or remove adapter_config.json."
        )
    for index in sorted(name for name in files if name.endswith(".index.json")):
        for shard in _shards(folder / index, named_by):
            if shard not in files or not shard.endswith(".safetensors"):
                raise UserError(
                    f"{named_by}: {folder / index} names {shard!r}, which is no safetensors file of this folder. "
                    f"Convert the model to safetensors."
                )


def _shards(index: Path, named_by: str) -> list[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{named_by}: {index} can't be read as an index of weights ({type(error).__name__})."
        ) from error
