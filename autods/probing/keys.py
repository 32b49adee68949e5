"""The keys of a DeepSpeed config that can be varied, read from `configs/deepspeed/keys.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from ..ds_config import get
from ..errors import InputError
from ..folders import data_folder
from ..ladder import Rung
from ..toml_files import checked, read_toml

ZERO = "zero_optimization"
PINS = tuple(f"{ZERO}.offload_{part}.pin_memory" for part in ("param", "optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What DeepSpeed knows, as the file has it."""

    scalars: tuple[str, ...]
    sections: tuple[str, ...]
    zero_optimization: Mapping[str, tuple[int, ...]]
    offload: Mapping[str, tuple[str, ...]]
    instead: Mapping[str, str]


@cache
def known_keys() -> Keys:
    """The shipped file."""
    path = data_folder("configs") / "deepspeed" / "keys.toml"
    return checked(Keys, read_toml(path), lambda keys: None, name="list of keys", where=str(path), mend="reinstall")


def check_key(key: str, axis: str) -> None:
    """Raises InputError when DeepSpeed has no such key, or something else decides it; `axis` is how it was asked."""
    keys = known_keys()
    if key in keys.instead:
        raise InputError(f"{axis}: a rung or another axis decides it", mend=f"give --vary {keys.instead[key]}")
    if key in keys.scalars:
        return
    first, _, rest = key.partition(".")
    if first in keys.sections and rest:
        return
    if first != ZERO or not rest:
        raise unknown(axis, key)
    part, _, inner = rest.partition(".")
    if part in keys.offload and inner in keys.offload[part]:
        return
    if part in keys.zero_optimization and not inner:
        return
    raise unknown(axis, key)


def all_keys() -> tuple[str, ...]:
    """Every key that is known in full."""
    keys = known_keys()
    inside = [f"{part}.{key}" for part, names in keys.offload.items() for key in names]
    return (*(f"{ZERO}.{key}" for key in (*keys.zero_optimization, *inside)), *keys.scalars)


def unheeded(key: str, rung: Rung) -> str | None:
    """Why the key means nothing under a rung; None: it does mean something."""
    first, _, rest = key.partition(".")
    if first == "aio" and "nvme" not in rung.places.values():
        return "nothing lies on NVMe"
    if first != ZERO:
        return None
    part = rest.partition(".")[0]
    if part in known_keys().offload:
        state = part.removeprefix("offload_")
        return None if get(rung.ds_config, f"{ZERO}.{part}") else f"the {_STATES[state]} stay on the device"
    stages = known_keys().zero_optimization[part]
    return None if rung.stage in stages else f"stage {rung.stage} does not obey it"


_STATES = {"param": "parameters", "optimizer": "optimizer states"}


def unknown(axis: str, name: str) -> InputError:
    """There is no such axis: the nearest ones, and what is possible at all."""
    possible = (*AXES, *all_keys())
    short = {key.rpartition(".")[2]: key for key in reversed(possible)}
    near = get_close_matches(name, possible, n=3)
    near = near or [short[one] for one in get_close_matches(name.rpartition(".")[2], short, n=3)]
    closest = f"did you mean {' or '.join(near)}? " if near else ""
    return InputError(
        f"{axis}: there is nothing of that name to vary",
        mend=f"{closest}possible are {', '.join(AXES)}, and the keys of a DeepSpeed config, such as "
        f"{ZERO}.reduce_bucket_size, optimizer.params.lr or gradient_clipping",
    )


# Names that are no key of a DeepSpeed config.
AXES = (
    "rung", "precision", "micro_batch", "accumulation", "checkpointing", "pin_memory", "gpus", "seq_len", "target_len",
    "build_model.NAME", "build_batch.NAME", "args.NAME", "env.NAME",
)  # fmt: skip
