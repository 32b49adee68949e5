"""What is varied: `--vary NAME=A,B,C` → an axis. A probe measures the cross product of its axes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..ladder import Rung
from ..values import Scalar
from ..workload.arguments import FUNCTIONS
from .keys import check_key, unknown

# None: an environment variable that is not set.
Value = Scalar | None

# What autods itself sets for the ranks, or needs as it is.
_OURS = (
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
    """Something that is varied, and its values in the order in which they were given."""

    name: str
    values: tuple[Value, ...]


def axes_of(vary: Sequence[str] | Mapping[str, Iterable[Any]], rungs: Mapping[str, Rung]) -> tuple[Axis, ...]:
    """The axes that were asked for: lines 'NAME=A,B', or names and values. Raises InputError for a wrong one."""
    given = vary.items() if isinstance(vary, Mapping) else [split(line) for line in vary]
    axes: dict[str, Axis] = {}
    for name, values in given:
        axis = axis_of(name, values, rungs)
        if axis.name in axes:
            raise InputError(f"--vary {axis.name} was given twice", mend="give all its values at once: NAME=A,B,C")
        axes[axis.name] = axis
    return tuple(axes.values())


def axis_of(name: str, values: Any, rungs: Mapping[str, Rung]) -> Axis:
    """One axis, its values by what they mean for that name."""
    said = f"--vary {name}"
    if isinstance(values, str):
        values = [parsed(part) for part in values.split(",")]
    found = list(values) if isinstance(values, Iterable) else [values]
    if not found:
        raise InputError(f"{said}: no value", mend="give at least one: NAME=A,B,C")
    name = _ALIASES.get(name, name)
    read = _reader(name, said, rungs)
    return Axis(name=name, values=tuple(_distinct(read(value) for value in found)))


def parsed(text: str) -> Value:
    """A value as JSON has it: true, 2, 1.5, "text", null; 1e6 is a whole number, and anything else is text."""
    text = text.strip()
    if _EXPONENT.fullmatch(text) and (number := float(text)).is_integer():
        return int(number)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text


def split(line: str) -> tuple[str, str]:
    """'NAME=A,B' → name and values."""
    name, equals, values = line.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(f"--vary {line}: it is NAME=A,B,C", mend="such as --vary rung=zero1,zero2")
    return name.strip(), values


def _distinct(values: Iterable[Value]) -> Iterable[Value]:
    """Each once; to Python True is 1."""
    return {(type(value), value): value for value in values}.values()


def _reader(name: str, said: str, rungs: Mapping[str, Rung]) -> Callable[[Any], Value]:
    """How a value of that name is read; a name that nothing has is refused here."""
    first, _, rest = name.partition(".")
    if name == "rung":
        return lambda value: _one_of(value, said, tuple(rungs), "the rungs are")
    if name == "precision":
        return lambda value: _one_of(value, said, ("bf16", "fp16", "fp32"), "a model trains in")
    if name in _COUNTS:
        return lambda value: _count(value, said)
    if name in ("checkpointing", "pin_memory"):
        return lambda value: _switch(value, said)
    if first == "env" and rest:
        if rest in _OURS:
            raise InputError(f"{said}: autods sets {rest} itself", mend="vary another variable, such as env.NCCL_ALGO")
        return lambda value: _environment(value, said)
    if first in ("args", *FUNCTIONS) and rest:
        return lambda value: _plain(value, said)
    if first in ("env", "args", *FUNCTIONS):
        raise unknown(said, name)
    check_key(name, said)
    return lambda value: _plain(value, said)


def _one_of(value: object, said: str, known: Sequence[str], words: str) -> str:
    if value not in known:
        raise InputError(f"{said}: there is no {value!r}", mend=f"{words}: {', '.join(known)}")
    return str(value)


def _count(value: object, said: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{said}: {value!r} is no whole number above 0")
    return value


def _switch(value: object, said: str) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in _SWITCHES:
        raise InputError(f"{said}: {value!r} is neither on nor off", mend="give on,off or true,false")
    return _SWITCHES[value.lower()]


def _environment(value: object, said: str) -> str | None:
    """As text, for that is what a process gets; null: not set."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        raise InputError(f"{said}: {value!r} is no text")
    return str(value)


def _plain(value: object, said: str) -> Scalar:
    if not isinstance(value, bool | int | float | str):
        raise InputError(f"{said}: {value!r} is no number, true, false or text")
    return value
