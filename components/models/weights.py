"""Load from a model's folder: no code of the folder runs, no pickle is read, and every weight comes from its files.

This is the only module that calls `from_pretrained` (tests/test_no_pickle.py). `use_safetensors=True` makes
transformers refuse a folder with only pytorch_model.bin. But transformers still reads a pickle if an index names it as
a shard or an adapter is beside the model; it initialises missing weights at random; and it downloads and runs attention
kernels that a config names (transformers 5.23, peft 0.21). The checks here refuse all of these.
"""

import contextlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from components.base.errors import TetherError, UserError, about
from components.base.paths import files_read, read_regular

_SAFELY = {"trust_remote_code": False, "local_files_only": True}
_ATTENTION = {None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"}
"""Attention implementations of transformers, torch or an installed package. Any other name is a hub repository."""
_NAMED = 5
"""Number of weights that an error names."""


@contextlib.contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """Yield a model's folder; for a single GGUF file, a temporary folder with only a link to it.

    So files beside a GGUF file, which no digest covers, are not read. Errors name the file.
    """
    if not path.is_file():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.absolute())
        try:
            yield Path(folder)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(path.parent))) from error


def check_weights(folder: Path, named_by: str) -> None:
    """Check that all weights of `folder` are safetensors or GGUF files in it, and that its config asks for no code.

    Args:
        folder: a model's folder.
        named_by: the option that names it, for the error.

    Raises:
        UserError: it has no such weights, or refers to others, or its config names an attention kernel of the hub.
    """
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    with about(named_by):
        files_read(folder)
    weights = sorted(name for name in files if name.endswith((".safetensors", ".gguf")))
    pickles = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
    if "adapter_config.json" in files:
        raise UserError(
            f"{named_by}: {folder} holds an adapter, and the model that it changes (base_model_name_or_path in its "
            "adapter_config.json) is needed whole. Merge the adapter into that model (peft: merge_and_unload) and give "
            "the merged folder, or remove adapter_config.json from a folder with a model."
        )
    for index in sorted(name for name in files if name.endswith(".index.json")):
        for shard in _shards(folder / index, named_by) if weights or "safetensors" in index else ():
            if not shard.endswith(".safetensors") or Path(shard).name != shard or not (folder / shard).is_file():
                raise UserError(
                    f"{named_by}: {folder / index} names {shard!r}, which is not a safetensors file in this folder. "
                    "If the model was copied or downloaded in part, download this file again; else convert the model "
                    "to safetensors."
                )
    if not weights:
        only = (
            f", only {', '.join(pickles)}, which may run code when read. Convert it to safetensors" if pickles else ""
        )
        raise UserError(f"{named_by}: {folder} holds no model.safetensors{only}.")
    if "config.json" in files:
        with refusing(folder / "config.json", named_by, "is not a model's config"):
            config = json.loads(read_regular(folder / "config.json"))
            _check_attention(config, folder, named_by)
            if isinstance(config, dict) and (quantization := config.get("quantization_config")) is not None:
                method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
                raise UserError(
                    f"{named_by}: {folder / 'config.json'} says that the weights are quantised "
                    f"(quantization_config: {method}): they can be neither trained nor published whole. "
                    "Use the model's unquantised weights; lora.quantize=4bit holds a frozen backbone in 4 bits."
                )


def count_parameters(folder: Path, named_by: str) -> int:
    """Return the number of parameters in `folder`, from the headers of its safetensors or GGUF files.

    Raises:
        UserError: as for `check_weights`, or a file's header cannot be read.
    """
    count = 0
    with as_folder(folder) as whole:
        check_weights(whole, named_by)
        for path in sorted(whole.glob("*.safetensors")) or sorted(whole.glob("*.gguf")):
            with refusing(path, named_by, "is not a weights file"):
                if path.suffix == ".gguf":
                    from gguf import GGUFReader

                    count += sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
                    continue
                from safetensors import safe_open

                with safe_open(path, framework="numpy") as file:
                    count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def load_whole(auto: Any, folder: Path, named_by: str, *, fresh_head: bool = False, **options: Any) -> Any:
    """Load a model in float32 and eval mode, with every weight from the folder's files.

    Args:
        auto: the class of transformers that loads it, such as AutoModelForCausalLM.
        named_by: the option that names the folder, for the error.
        fresh_head: the folder has a language model, whose output layer is not used; the caller initialises `score`.
        options: further arguments of `from_pretrained`, such as `gguf_file`.

    Raises:
        UserError: transformers cannot load it; a weight is missing, left over, of the wrong shape, NaN or infinite.
    """
    check_weights(folder, named_by)
    with refusing(folder, named_by, "holds no model that transformers can load"):
        model, info = auto.from_pretrained(
            folder, dtype="float32", use_safetensors="gguf_file" not in options, ignore_mismatched_sizes=True,
            output_loading_info=True, **_SAFELY, **options,
        )  # fmt: skip
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    if fresh_head:
        missing -= {"score.weight"}
        unexpected = {name for name in unexpected if f".{model.base_model_prefix}." in f".{name}"}
    check_names(folder, named_by, missing, unexpected, {str(name[0]) for name in info["mismatched_keys"]})
    _check_tied(model, folder, named_by)
    check_finite(folder, named_by, model.state_dict())
    return model.eval()


def _check_tied(model: Any, folder: Path, named_by: str) -> None:
    """Raise a UserError if the config ties the output layer to the embeddings, and the files hold another one."""
    layer = model.get_output_embeddings()
    if layer is None or not model.config.tie_word_embeddings or layer.weight is model.get_input_embeddings().weight:
        return
    name = next(name for name, weight in model.named_parameters() if weight is layer.weight)
    if name in (model._tied_weights_keys or ()):
        raise UserError(
            f"{named_by}: {folder} holds two models: its config ties the output layer to the input embeddings "
            f"(tie_word_embeddings), as vLLM and transformers 4 read it, and its weights hold another one ({name}), "
            "which transformers 5 uses. Set tie_word_embeddings to false in config.json to use the stored layer, or "
            f"remove {name} from the weights to use the embeddings."
        )


def load_from(auto: Any, folder: Path, named_by: str = "the artifact", **options: Any) -> Any:
    """Load a tokenizer or config (`AutoTokenizer`, `AutoConfig`) of a model's folder.

    Raises:
        UserError: transformers cannot load it.
    """
    what = "tokenizer" if "Tokenizer" in auto.__name__ else "config"
    with about(named_by), refusing(folder, named_by, f"holds no model whose {what} transformers can load"):
        if (folder / "config.json").exists():
            files_read(folder)
        return auto.from_pretrained(folder, **_SAFELY, **options)


def check_names(
    folder: Path, named_by: str, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[str]
) -> None:
    """Check that the names and shapes of a file's weights are those of the model.

    Raises:
        UserError: weights are missing, left over, or of the wrong shape; the message names them.
    """
    kinds = {"it lacks": missing, "no layer takes": unexpected, "these have another shape": mismatched}
    problems = [f"{kind} {_some(sorted(names))}" for kind, names in kinds.items() if names]
    if problems:
        raise UserError(
            f"{named_by}: the weights in {folder} do not fit the model that its config describes: "
            f"{'; '.join(problems)}. Tether does not fill them in at random. Check that config and weights "
            "belong together, and that the names of the weights are the architecture's."
        )


def check_finite(folder: Path, named_by: str, weights: Mapping[str, Any]) -> None:
    """Check that no weight (name to tensor) is NaN or infinite.

    Raises:
        UserError: some are; the message names them.
    """
    bad = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise UserError(f"{named_by}: weights in {folder} are NaN or infinite: {_some(bad)}. Use an undamaged copy.")


@contextlib.contextmanager
def refusing(path: Path, named_by: str, what: str) -> Iterator[None]:
    """Turn whatever a library raises within the block into a UserError of one paragraph.

    Raises:
        UserError: "`path` `what`", with the first lines of the cause.
    """
    try:
        yield
    except (TetherError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        cause = " ".join(str(error).split())[:400]
        raise UserError(f"{named_by}: {path} {what} ({type(error).__name__}): {cause}") from error


def _check_attention(config: Any, folder: Path, named_by: str) -> None:
    """Check the attention that a config, or a config inside it, names."""
    if isinstance(config, list):
        for part in config:
            _check_attention(part, folder, named_by)
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.strip("_").startswith("attn_implementation"):
            for name in value.values() if isinstance(value, dict) else [value]:
                if name not in _ATTENTION:
                    raise UserError(
                        f"{named_by}: {folder / 'config.json'} asks for the attention kernel {name!r}, which would be "
                        f"fetched and run. Remove {key} from it."
                    )
        _check_attention(value, folder, named_by)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _shards(index: Path, named_by: str) -> list[str]:
    with refusing(index, named_by, "can't be read as an index of weights"):
        return sorted({str(name) for name in json.loads(read_regular(index))["weight_map"].values()})
