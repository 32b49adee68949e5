"""The axes of a probe: their names, values and experiments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ..config.deepspeed import get_key
from ..config.strategies import Rung
from ..errors import InputError
from ..schema import read_checked, read_toml
from ..system.host import data_folder
from ..types import Scalar
from ..workload.protocol import FUNCTIONS

ZERO = "zero_optimization"
PINS = tuple(f"{ZERO}.offload_{part}.pin_memory" for part in ("param", "optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a DeepSpeed config, as the file lists them."""

    scalars: tuple[str, ...]
    sections: tuple[str, ...]
    zero_optimization: Mapping[str, tuple[int, ...]]
    offload: Mapping[str, tuple[str, ...]]
    instead: Mapping[str, str]


@cache
def read_known_keys() -> Keys:
    """Read the shipped file."""
    path = data_folder("configs") / "deepspeed" / "keys.toml"
    hint = "reinstall autods"
    return read_checked(Keys, read_toml(path), lambda keys: None, name="list of keys", place=str(path), hint=hint)


def check_key(key: str, axis: str) -> None:
    """Raise InputError when DeepSpeed has no such key or a rung or another axis decides it."""
    keys = read_known_keys()
    if key in keys.instead:
        raise InputError(f"{axis}: a rung or another axis decides it", hint=f"give --vary {keys.instead[key]}")
    if key in keys.scalars:
        return
    first, _, rest = key.partition(".")
    if first in keys.sections and rest:
        return
    if first != ZERO or not rest:
        raise unknown_axis(axis, key)
    part, _, inner = rest.partition(".")
    if part in keys.offload and inner in keys.offload[part]:
        return
    if part in keys.zero_optimization and not inner:
        return
    raise unknown_axis(axis, key)


def list_keys() -> tuple[str, ...]:
    """Return every key that is known in full."""
    keys = read_known_keys()
    inside = [f"{part}.{key}" for part, names in keys.offload.items() for key in names]
    return (*(f"{ZERO}.{key}" for key in (*keys.zero_optimization, *inside)), *keys.scalars)


def why_ineffective(key: str, rung: Rung) -> str | None:
    """Return why the key has no effect under a rung; None when it has one."""
    first, _, rest = key.partition(".")
    if first == "aio" and "nvme" not in rung.places.values():
        return "nothing lies on NVMe"
    if first != ZERO:
        return None
    part = rest.partition(".")[0]
    if part in read_known_keys().offload:
        state = part.removeprefix("offload_")
        return None if get_key(rung.ds_config, f"{ZERO}.{part}") else f"the {_STATES[state]} stay on the device"
    stages = read_known_keys().zero_optimization[part]
    return None if rung.stage in stages else f"stage {rung.stage} does not obey it"


_STATES = {"param": "parameters", "optimizer": "optimizer states"}


def unknown_axis(axis: str, name: str) -> InputError:
    """Return the error for an axis that does not exist, with the nearest names and all that are possible."""
    possible = (*AXES, *list_keys())
    short = {key.rpartition(".")[2]: key for key in reversed(possible)}
    near = get_close_matches(name, possible, n=3)
    near = near or [short[key] for key in get_close_matches(name.rpartition(".")[2], short, n=3)]
    closest = f"did you mean {' or '.join(near)}? " if near else ""
    return InputError(
        f"{axis}: there is nothing of that name to vary",
        hint=f"{closest}possible are {', '.join(AXES)}, and the keys of a DeepSpeed config, such as "
        f"{ZERO}.reduce_bucket_size, optimizer.params.lr or gradient_clipping",
    )


# Axes that are not keys of a DeepSpeed config.
AXES = (
    "rung", "precision", "micro_batch", "accumulation", "checkpointing", "pin_memory", "gpus", "seq_len", "target_len",
    "build_model.NAME", "build_batch.NAME", "args.NAME", "env.NAME",
)  # fmt: skip

# None stands for an environment variable that is not set.
Value = Scalar | None
# Variables that autods sets for the ranks, or must not change.
_RESERVED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_",
    "THP_MEM_ALLOC_ENABLE", "TOKENIZERS_PARALLELISM", "PATH", "TORCH_EXTENSIONS_DIR", "DS_ACCELERATOR",
    "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip
_ALIASES = {"train_micro_batch_size_per_gpu": "micro_batch", "gradient_accumulation_steps": "accumulation"}
_COUNTS = ("micro_batch", "accumulation", "gpus", "seq_len", "target_len")
_SWITCHES = {"on": True, "off": False, "true": True, "false": False}
_EXPONENT = re.compile(r"[+-]?\d+(\.\d+)?[eE]\+?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A name that is varied, and its values in the given order."""

    name: str
    values: tuple[Value, ...]


def read_axes(vary: Sequence[str] | Mapping[str, Iterable[Any]], rungs: Mapping[str, Rung]) -> tuple[Axis, ...]:
    """Read axes from lines 'NAME=A,B' or from names and values. Raises InputError."""
    given = vary.items() if isinstance(vary, Mapping) else [split_axis(line) for line in vary]
    axes: dict[str, Axis] = {}
    for name, values in given:
        axis = read_axis(name, values, rungs)
        if axis.name in axes:
            raise InputError(f"--vary {axis.name} was given twice", hint="give all its values at once: NAME=A,B,C")
        axes[axis.name] = axis
    return tuple(axes.values())


def read_axis(name: str, values: Any, rungs: Mapping[str, Rung]) -> Axis:
    """Read one axis; the name decides how its values are read."""
    option = f"--vary {name}"
    if isinstance(values, str):
        values = [parse_value(part) for part in values.split(",")]
    given = list(values) if isinstance(values, Iterable) else [values]
    if not given:
        raise InputError(f"{option}: no value", hint="give at least one: NAME=A,B,C")
    name = _ALIASES.get(name, name)
    read = _reader(name, option, rungs)
    return Axis(name=name, values=tuple(_distinct(read(value) for value in given)))


def parse_value(text: str) -> Value:
    """Read a value as JSON: true, 2, 1.5, "text", null. 1e6 is a whole number, and anything else is text."""
    text = text.strip()
    if _EXPONENT.fullmatch(text) and (number := float(text)).is_integer():
        return int(number)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text


def split_axis(line: str) -> tuple[str, str]:
    """Split 'NAME=A,B' into name and values."""
    name, equals, values = line.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(f"--vary {line}: it is NAME=A,B,C", hint="such as --vary rung=zero1,zero2")
    return name.strip(), values


def _distinct(values: Iterable[Value]) -> Iterable[Value]:
    """Return each value once; True and 1 are different values."""
    return {(type(value), value): value for value in values}.values()


def _reader(name: str, option: str, rungs: Mapping[str, Rung]) -> Callable[[Any], Value]:
    """Return how a value of that name is read. Raises InputError for a name that does not exist."""
    first, _, rest = name.partition(".")
    if name == "rung":
        return lambda value: _one_of(value, option, tuple(rungs), "the rungs are")
    if name == "precision":
        return lambda value: _one_of(value, option, ("bf16", "fp16", "fp32"), "a model trains in")
    if name in _COUNTS:
        return lambda value: _count(value, option)
    if name in ("checkpointing", "pin_memory"):
        return lambda value: _switch(value, option)
    if first == "env" and rest:
        if rest in _RESERVED:
            raise InputError(
                f"{option}: autods sets {rest} itself", hint="vary another variable, such as env.NCCL_ALGO"
            )
        return lambda value: _environment(value, option)
    if first in ("args", *FUNCTIONS) and rest:
        return lambda value: _plain(value, option)
    if first in ("env", "args", *FUNCTIONS):
        raise unknown_axis(option, name)
    check_key(name, option)
    return lambda value: _plain(value, option)


def _one_of(value: object, option: str, known: Sequence[str], words: str) -> str:
    if value not in known:
        raise InputError(f"{option}: there is no {value!r}", hint=f"{words}: {', '.join(known)}")
    return str(value)


def _count(value: object, option: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{option}: {value!r} is not a whole number above 0")
    return value


def _switch(value: object, option: str) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in _SWITCHES:
        raise InputError(f"{option}: {value!r} is neither on nor off", hint="give on,off or true,false")
    return _SWITCHES[value.lower()]


def _environment(value: object, option: str) -> str | None:
    """Read a variable's value as text; null leaves it unset."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        raise InputError(f"{option}: {value!r} is not text")
    return str(value)


def _plain(value: object, option: str) -> Scalar:
    if not isinstance(value, bool | int | float | str):
        raise InputError(f"{option}: {value!r} is not a number, true, false or text")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Axes by name, as a file has them."""

    name: str
    vary: Mapping[str, tuple[Any, ...]]
    title: str = ""


def read_experiment(name: str) -> Experiment:
    """Read a shipped experiment by name, or a TOML file by path. Raises InputError."""
    folder = data_folder("configs") / "experiments"
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in folder.glob("*.toml")))
        raise InputError(f"there is no experiment {name!r}", hint=f"give one of {known}, or the path of a .toml file")
    hint = f"compare with {folder / 'stages.toml'}"
    return read_checked(Experiment, read_toml(path), _check, name="experiment", place=str(path), hint=hint)


def _check(experiment: Experiment) -> None:
    if not experiment.vary or not all(experiment.vary.values()):
        raise ValueError("vary needs an axis, and each axis a value")


def add_experiment(
    name: str | Path | None, vary: Sequence[str] | Mapping[str, Iterable[Any]]
) -> Sequence[str] | Mapping[str, Iterable[Any]]:
    """Return the experiment's axes and those of the request, which replace axes of the same name."""
    if name is None:
        return vary
    given = vary if isinstance(vary, Mapping) else _by_name(vary)
    axes = read_experiment(str(name)).vary
    return {**axes, **given}


def _by_name(lines: Sequence[str]) -> dict[str, Any]:
    """Return the values of lines 'NAME=A,B' by name. Raises InputError."""
    named: dict[str, Any] = {}
    for name, values in map(split_axis, lines):
        if name in named:
            raise InputError(f"--vary {name} was given twice", hint="give all its values at once: NAME=A,B,C")
        named[name] = values
    return named
