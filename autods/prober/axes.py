"""The axes of a probe: their names, values and experiments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from math import isfinite
from typing import Any

from ..arguments import MOST_COUNT, show_value
from ..config.checkpointing import STATES, read_state
from ..config.deepspeed import get_key, read_known_keys
from ..config.profiles import find_toml
from ..config.releases import find_removed_keys
from ..config.rungs import Rung
from ..devices import DEVICES
from ..errors import InputError
from ..rank.launch_variables import RANK_VARIABLES
from ..schema import check_name, read_toml_as
from ..system.host import data_folder
from ..types import Scalar
from ..workload.protocol import FUNCTIONS
from ..workload.script_source import PLACEHOLDERS

ZERO = "zero_optimization"


def list_keys() -> tuple[str, ...]:
    """Return every key that is known in full."""
    keys = read_known_keys()
    inside = [f"{part}.{key}" for part, names in keys.offload.items() for key in names]
    return (*(f"{ZERO}.{key}" for key in (*keys.zero_optimization, *inside)), *keys.scalars)


def why_ineffective(key: str, rung: Rung) -> str | None:
    """Return why the key has no effect under a rung; None when it has one."""
    first, _, rest = key.partition(".")
    if first == "aio" and not rung.uses_nvme:
        return "nothing lies on NVMe"
    if first != ZERO:
        return None
    part = rest.partition(".")[0]
    if part in read_known_keys().offload:
        states = "parameters" if part == "offload_param" else "optimizer states"
        return None if get_key(rung.ds_config, f"{ZERO}.{part}") else f"the {states} stay on the device"
    stages = read_known_keys().zero_optimization[part]
    return None if rung.stage in stages else f"stage {rung.stage} does not obey it"


# Axes that are not keys of a DeepSpeed config.
AXES = (
    "rung", "precision", "micro_batch", "accumulation", "checkpointing", "pin_memory", "gpus", "seq_len", "target_len",
    "build_model.NAME", "build_batch.NAME", "args.NAME", "env.NAME",
)  # fmt: skip

MOST_VALUES = 1000  # of one axis; a probe has at most as many cells
# None stands for an environment variable that is not set.
Value = Scalar | None
# Variables that autods sets for ranks on any device, or must not change.
_RESERVED = (
    *RANK_VARIABLES, "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "THP_MEM_ALLOC_ENABLE",
    "PATH", "TORCH_EXTENSIONS_DIR",
)  # fmt: skip
_ALIASES = {"train_micro_batch_size_per_gpu": "micro_batch", "gradient_accumulation_steps": "accumulation"}
_SWITCHES = {"on": True, "off": False, "true": True, "false": False}
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_EXPONENT = re.compile(r"[+-]?\d+(\.\d+)?[eE]\+?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A name that is varied, and its values in the given order."""

    name: str
    values: tuple[Value, ...]


def read_axes(
    vary: Sequence[str] | Mapping[str, Iterable[Any]], rungs: Mapping[str, Rung], experiment: str | None = None
) -> tuple[Axis, ...]:
    """Read axes from lines 'NAME=A,B' or from names and values. Raises InputError.

    They replace the axes of the same name that a file of experiments brings.
    """
    brought = read_experiment(experiment).vary if experiment is not None else {}
    axes = {axis.name: axis for axis in (read_axis(name, values, rungs) for name, values in brought.items())}
    given: set[str] = set()
    for name, values in vary.items() if isinstance(vary, Mapping) else map(split_axis, vary):
        axis = read_axis(name, values, rungs)
        if axis.name in given:
            raise InputError(f"--vary {axis.name} was given twice", hint="give all its values at once: NAME=A,B,C")
        given.add(axis.name)
        axes[axis.name] = axis
    return tuple(axes.values())


def split_axis(line: str) -> tuple[str, str]:
    name, equals, values = line.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(f"--vary {line}: it is NAME=A,B,C", hint="such as --vary rung=zero1,zero2")
    return name.strip(), values


def read_axis(name: str, values: Any, rungs: Mapping[str, Rung]) -> Axis:
    """Read one axis; the name decides how its values are read. True and 1 are different values."""
    option = f"--vary {name}"
    if isinstance(values, str):
        values = [parse_value(part) for part in values.split(",")]
    given = list(islice(values, MOST_VALUES + 1)) if isinstance(values, Iterable) else [values]
    if len(given) > MOST_VALUES:
        raise InputError(f"{option}: more than {MOST_VALUES:,} values")
    if not given:
        raise InputError(f"{option}: no value", hint="give at least one: NAME=A,B,C")
    name = _ALIASES.get(name, name)
    _check_name(name, option)
    read = [_read_value(name, value, option, rungs) for value in given]
    return Axis(name=name, values=tuple({(type(value), value): value for value in read}.values()))


def parse_value(text: str) -> Value:
    """Read a value as JSON: true, 2, 1.5, "text", null. 1e6 is a whole number, and anything else is text."""
    text = text.strip()
    if _EXPONENT.fullmatch(text) and (number := float(text)).is_integer():
        return int(number)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text


def _check_name(name: str, option: str) -> None:
    """Raise InputError for a name that does not exist, with the nearest ones, and for what autods itself decides."""
    keys = read_known_keys()
    first, _, rest = name.partition(".")
    of_devices = {variable for each in DEVICES.values() for variable in (*each.variables, each.visible_variable)}
    if first == "env" and rest and (rest in _RESERVED or rest in of_devices):
        raise InputError(f"{option}: autods sets {rest} itself", hint="vary another variable, such as env.NCCL_ALGO")
    if first == "env" and rest and not _VARIABLE.fullmatch(rest):
        raise InputError(f"{option}: {rest!r} is not the name of an environment variable")
    if first == "args" and rest in PLACEHOLDERS:
        instead = {"micro_batch_size": "micro_batch", "gradient_accumulation_steps": "accumulation"}.get(rest)
        hint = f"give --vary {instead}=…" if instead else "give your placeholder another name"
        raise InputError(f"{option}: autods fills in {{{rest}}} itself", hint=hint)
    if name in keys.instead:
        raise InputError(f"{option}: a rung or another axis decides it", hint=f"give --vary {keys.instead[name]}")
    if name in keys.removed or first in keys.removed:
        key = name if name in keys.removed else first
        if key in (removed := find_removed_keys()):
            raise InputError(f"{option}: the installed DeepSpeed has removed {key}", hint=removed[key])
        if key in keys.removed_varied and (key == name or rest):
            return
    possible = (*AXES, *list_keys())
    if name in possible or (rest and first in ("env", "args", *FUNCTIONS, *keys.sections)):
        return
    short = {key.rpartition(".")[2]: key for key in reversed(possible)}
    near = get_close_matches(name, possible, n=3)
    near = near or [short[key] for key in get_close_matches(name.rpartition(".")[2], short, n=3)]
    closest = f"did you mean {' or '.join(near)}? " if near else ""
    raise InputError(
        f"{option}: there is nothing of that name to vary",
        hint=f"{closest}possible are {', '.join(AXES)}, and the keys of a DeepSpeed config, such as "
        f"{ZERO}.reduce_bucket_size, optimizer.params.lr or gradient_clipping",
    )


def _read_value(name: str, value: Any, option: str, rungs: Mapping[str, Rung]) -> Value:
    match name.partition(".")[0]:
        case "rung" | "precision":
            known = tuple(rungs) if name == "rung" else ("bf16", "fp16", "fp32")
            if value in known:
                return str(value)
            words = "the rungs are" if name == "rung" else "a model trains in"
            raise InputError(f"{option}: there is no {value!r}", hint=f"{words}: {', '.join(known)}")
        case "micro_batch" | "accumulation" | "gpus" | "seq_len" | "target_len":
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_COUNT:
                return value
            raise InputError(f"{option}: {show_value(value)} is not a whole number above 0, {MOST_COUNT:,} at most")
        case "checkpointing":
            state = read_state(value)
            if state is None:
                raise InputError(
                    f"{option}: {value!r} is none of {', '.join(STATES)}", hint="give on,off or on,offload"
                )
            return {"off": False, "on": True}.get(state, state)
        case "pin_memory":
            switch = value if isinstance(value, bool) else _SWITCHES.get(str(value).lower())
            if switch is not None:
                return switch
            raise InputError(f"{option}: {value!r} is neither on nor off", hint="give on,off or true,false")
        case "env" if value is None or isinstance(value, str):  # None leaves the variable unset
            return value
        case "env" if isinstance(value, bool | int | float):
            return str(value).lower()
        case "env":
            raise InputError(f"{option}: {value!r} is not text")
        case _ if isinstance(value, float) and not isfinite(value):
            raise InputError(f"{option}: {value} is not a number that a config can hold")
        case _ if isinstance(value, bool | int | float | str):
            return value
        case _:
            raise InputError(f"{option}: {value!r} is not a number, true, false or text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Axes by name, as a file has them."""

    name: str
    vary: Mapping[str, tuple[Any, ...]]
    title: str = ""


def read_experiment(name: str) -> Experiment:
    """Read a shipped experiment by name, or a TOML file by path. Raises InputError."""
    folder = data_folder("configs") / "experiments"
    path, hint = find_toml(name, folder, "experiment"), f"compare with {folder / 'stages.toml'}"

    def check(experiment: Experiment) -> None:
        check_name(experiment.name)
        if not experiment.vary or not all(experiment.vary.values()):
            raise ValueError("vary needs an axis, and each axis a value")

    return read_toml_as(Experiment, path, name="experiment", check=check, hint=hint)
