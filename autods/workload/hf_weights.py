"""The weights of a local Hugging Face folder: `--weights` starts from its safetensors, in one file or in shards.

Nothing is downloaded, and no pickle is opened: `pytorch_model.bin` may run code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import read_text
from ..schema import parse_json
from .protocol import WorkloadError

_FILE = "model.safetensors"
_INDEX = f"{_FILE}.index.json"
_MOST_HEADER = 100_000_000  # bytes, as safetensors bounds it
_HINT = "give the folder that save_pretrained wrote, or drop --weights: the model then starts from random weights"


def describe_weights(folder: Path) -> bytes:
    """Return what identifies the weights of the folder: the name, size and header of each of their files.

    The values are not read, which would take minutes. Raises InputError where a file is missing or cut short.
    """
    if os.path.isfile(folder / _FILE):
        names = [_FILE]
    elif os.path.isfile(folder / _INDEX):
        names = _read_index(folder / _INDEX)
    else:
        pickled = any(folder.glob("pytorch_model*.bin"))
        why = "; pytorch_model.bin is not opened, because a pickle may run code" if pickled else ""
        raise InputError(f"has no {_FILE} and no {_INDEX}{why}", place=str(folder), hint=_HINT)
    return b"\0".join(b"%b\0%b" % (os.fsencode(name), _read_header(folder / name)) for name in names)


def make_quantized_error(method: str, folder: Path) -> InputError:
    """The error for a folder of quantized weights: training starts from whole ones."""
    return InputError(
        f"--weights: its weights are quantized ({method}), and training starts from whole ones",
        place=str(folder),
        hint="give the folder of the original model, or save it dequantized by transformers; "
        "--lora 4bit:RANK then quantizes whole weights by itself",
    )


def load_weights(auto: Any, config: Any, folder: Path) -> Any:
    """Return the model with the weights of the folder, in fp32, ready to train.

    Inside `rank.zero_init.partition_at_build` rank 0 reads them, and each rank keeps its part.
    Raises WorkloadError where the weights are not those of the config.
    """
    import torch

    try:
        model, loading = auto.from_pretrained(
            str(folder), config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except (RuntimeError, ValueError, OSError) as error:  # as transformers reports other shapes and torn files
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
            raise
        reason = " ".join(str(error).split())
        raise WorkloadError(f"--weights: transformers refuses them: {reason:.300}", place=str(folder)) from None
    if missing := sorted(loading["missing_keys"]):
        raise WorkloadError(
            f"--weights: the files lack {len(missing)} of the model's weights, {missing[0]} for one",
            place=str(folder),
            hint="give --task for another head, or write a model.py that makes the new layers",
        )
    return model.train()  # from_pretrained returns it as for evaluation


def _read_index(path: Path) -> list[str]:
    """The names of the shards that the index lists."""
    index = parse_json(read_text(path, hint=_HINT), place=str(path), hint=_HINT)
    shards = index.get("weight_map") if isinstance(index, Mapping) else None
    names = sorted(set(map(str, shards.values()))) if isinstance(shards, Mapping) else []
    if not names or any(os.path.basename(name) != name for name in names):
        raise InputError('is no index of shards: it has no "weight_map" of file names', place=str(path), hint=_HINT)
    return names


def _read_header(path: Path) -> bytes:
    """The size and the header of a safetensors file. Raises InputError where the file is not whole."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size, _MOST_HEADER) else b""
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", place=str(path), hint=_HINT) from None
    if not header:
        raise InputError("is no safetensors file", place=str(path), hint=_HINT)
    tensors = parse_json(header.decode("utf-8", "replace"), place=str(path), hint=_HINT)
    try:
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (AttributeError, LookupError, TypeError):  # JSON of another form
        raise InputError("is no safetensors file", place=str(path), hint=_HINT) from None
    if size < whole:
        raise InputError(f"is cut short: {size:,} bytes of {whole:,}", place=str(path), hint="copy it again")
    return b"%d\0%b" % (size, header)
