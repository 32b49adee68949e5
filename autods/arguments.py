"""How an argument of a command is declared and checked: its type, its option on the command line, its help.

A request (`requests`) is a frozen dataclass of such fields.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from itertools import islice
from numbers import Integral, Real
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

from .errors import InputError
from .files import check_path

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """The values that an argument accepts: their Python types, and the same in words for a message.

    `cli` is the type of the option on the command line. `items` are the values of a list, or the keys of a dict.
    """

    types: tuple[type, ...]
    words: str
    cli: Any = str
    items: ArgumentType | None = None

    def accepts(self, value: Any) -> bool:
        """Whether the value has one of the types. True and False are no numbers, and text is no list."""
        if isinstance(value, bool):
            return bool in self.types or object in self.types
        if isinstance(value, str | bytes | os.PathLike):  # Python can iterate over text
            return isinstance(value, tuple(each for each in self.types if each is not Iterable))
        return isinstance(value, self.types)


MOST_COUNT = 10**9  # of any number that counts something
_MOST_ITEMS = 10_000  # of a list

_WHOLE = ArgumentType((Integral,), "a whole number", int)
_TEXT = ArgumentType((str,), "text")
_PATH = ArgumentType((str, os.PathLike), "a path")

Count = Annotated[int, _WHOLE]
Text = Annotated[str, _TEXT]
Switch = Annotated[bool, ArgumentType((bool,), "True or False", bool)]
Size = Annotated[str | int, ArgumentType((str, Real), "a size such as '16GiB', or bytes")]
Duration = Annotated[str | float, ArgumentType((str, Real), "a time such as '20m', or seconds")]
PathText = Annotated[str | os.PathLike[str], _PATH]
ConfigSource = Annotated[
    str | os.PathLike[str] | Mapping[str, Any], ArgumentType((str, os.PathLike, Mapping), "a path or a dict")
]
Texts = Annotated[Sequence[str], ArgumentType((Iterable,), "a list", list[str], items=_TEXT)]
Paths = Annotated[Sequence[str | os.PathLike[str]], ArgumentType((Iterable,), "a list", list[str], items=_PATH)]
Names = Annotated[str | Sequence[str], ArgumentType((str, Iterable), "text such as 'a,b', or a list", items=_TEXT)]
Amount = Annotated[str | float, ArgumentType((str, Real), "an amount such as '300B', or a number")]
Prices = Annotated[
    str | float | Mapping[str, float],
    ArgumentType((str, Real, Mapping), "a price, or a dict of machines and prices"),
]
RankOfLora = Annotated[str | int, ArgumentType((str, Integral), "a rank such as 16, '16,q_proj,v_proj', or '4bit:16'")]
Checkpointing = Annotated[
    str | bool, ArgumentType((str, bool), "'on', 'off', 'every-2', 'every-3', 'every-4', 'offload', True or False")
]
Counts = Annotated[int | str | Sequence[int], ArgumentType((object,), "a number, or several")]
Axes = Annotated[
    Sequence[str] | Mapping[str, Iterable[Any]],
    ArgumentType((Mapping, Iterable), "a list or a dict", list[str], items=_TEXT),
]


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line spells a field, and its help text.

    `panel` is the group in which help shows the option; an option of the Python API alone has none. Help shows
    `shown_default` where the real default depends on something. `flags` are spellings other than --name. `most` is the
    largest value of a number, and `counts` what it counts, where at least one is needed.
    """

    panel: str
    help: str
    metavar: str | None = None
    shown_default: str | None = None
    flags: tuple[str, ...] = ()
    positional: bool = False
    most: int = MOST_COUNT
    counts: str = ""


def option(panel: str, help: str, metavar: str | None = None, *, default: Any = None, **more: Any) -> Any:
    """A field that is an option; see `Option`."""
    return field(default=default, metadata={"option": Option(panel, help, metavar, **more)})


def argument(help: str, metavar: str) -> Mapping[str, Option]:
    """The metadata of a field that the command line takes by its position."""
    return {"option": Option("Workload", help, metavar, positional=True)}


def listener(help: str) -> Any:
    """A field that only the Python API has."""
    return field(default=None, compare=False, repr=False, metadata={"option": Option("", help)})


@dataclass(frozen=True, kw_only=True)
class Request:
    def __post_init__(self) -> None:
        """Raises InputError for a value of another type or size, and for empty text.

        Numbers become Python's own, numpy's too.
        """
        for each in fields(self):
            _refuse_empty_text(each, getattr(self, each.name))
        hints = field_types(type(self))
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            option: Option = each.metadata["option"]
            if not option.panel and not (value is None or callable(value)):
                raise InputError(f"{name}={show_value(value)}: a function is needed, not {type(value).__name__}")
            kind = find_argument_type(hints[name])
            if kind is None or (value is None and type(None) in get_args(hints[name])):
                continue
            value = check_value(name, value, kind)
            if kind is _WHOLE and option.counts and value < 1:
                problem = f"{_spell(name)} {show_value(value)}: at least one {option.counts} is needed"
                raise InputError(problem, hint=f"give {_spell(name)} 1 or more")
            if kind is _WHOLE and abs(value) > option.most:
                raise InputError(f"{_spell(name)} {show_value(value)}: {option.most:,} is the most")
            object.__setattr__(self, name, value)


def _refuse_empty_text(field: Field[Any], value: Any) -> None:
    """Raises InputError that names an option of empty text, which a shell makes of a variable that is not set.

    As a path it would mean the current folder. A script's own arguments may be empty.
    """
    option: Option = field.metadata["option"]
    values = value if isinstance(value, list | tuple) and field.name != "script_args" else [value]
    if any(isinstance(item, str) and not item for item in values):
        name = (option.metavar or "").rstrip(".") if option.positional else f"--{field.name.replace('_', '-')}"
        raise InputError(f"{name} is empty", hint="give it a value, or leave it out")


def field_types(request: type) -> Mapping[str, Any]:
    """The type of each field, with its `ArgumentType`; types of higher layers become Any."""
    above = {"Workload": Any, "Listener": Any}
    return get_type_hints(request, localns=above, include_extras=True)


def list_options(request: Any) -> list[Field[Any]]:
    """The fields that are options of the command line, first those that it takes by position."""
    options = [each for each in fields(request) if each.metadata["option"].panel]
    return sorted(options, key=lambda each: each.kw_only is True)


# What other tools call an argument, by the name that it has here: torchrun, deepspeed, accelerate, the HF Trainer,
# Lightning, Slurm.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "workload": ("model", "script", "model_name_or_path", "training_script"),
    "gpus": ("num_gpus", "n_gpus", "ngpus", "nproc_per_node", "num_processes", "world_size", "ranks", "devices"),
    "nodes": ("nnodes", "num_nodes", "num_machines"),
    "on": ("machine", "hardware", "gpu_type", "card"),
    "gpu_memory": ("memory", "vram", "device_memory", "gpu_mem"),
    "host_memory": ("cpu_memory", "ram", "mem"),
    "seq_len": (
        "seqlen", "seq_length", "sequence_length", "max_length", "max_seq_len", "max_seq_length", "block_size",
        "cutoff_len", "context_length",
    ),
    "micro_batch": ("micro_batch_size", "mbs", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    "global_batch": (
        "batch_size", "batch", "train_batch_size", "global_batch_size", "gbs", "gradient_accumulation_steps",
        "gradient_accumulation", "accumulation", "accumulation_steps", "grad_accum", "accumulate_grad_batches",
    ),
    "precision": ("bf16", "fp16", "fp32", "dtype", "mixed_precision", "torch_dtype"),
    "checkpointing": ("gradient_checkpointing", "activation_checkpointing", "recompute"),
    "ladder": (
        "zero_stage", "stage", "zero", "rung", "rungs", "strategy", "offload", "cpu_offload", "offload_optimizer",
        "offload_optimizer_device", "offload_param", "offload_param_device",
    ),
    "base_config": ("deepspeed", "ds_config", "deepspeed_config_file", "config_file"),
    "lora": ("lora_r", "lora_rank", "qlora", "peft"),
    "out": ("output_dir", "output", "out_dir"),
    "max_time": ("timeout", "time_limit", "time", "budget"),
    "max_trials": ("trials", "n_trials", "num_trials"),
}  # fmt: skip


def find_by_other_name(name: str, request: Any) -> Field[Any] | None:
    """The argument of the request that other tools call --name, if there is one."""
    plain = name.lstrip("-").replace("-", "_").lower()
    return next((each for each in list_options(request) if plain in OTHER_NAMES.get(each.name, ())), None)


def find_argument_type(hint: Any) -> ArgumentType | None:
    """The `ArgumentType` in a field's type, such as Count | None. None means that any value is accepted."""
    if get_origin(hint) is Annotated:
        return next((each for each in hint.__metadata__ if isinstance(each, ArgumentType)), None)
    return next((kind for part in get_args(hint) if (kind := find_argument_type(part)) is not None), None)


def check_value(name: str, value: Any, kind: ArgumentType) -> Any:
    """Return the value as a request keeps it. Raises InputError that names an argument of another type.

    No text has a NUL character. A path is one that a file can have. A list is a tuple, of limited length.
    """
    if not kind.accepts(value):
        raise InputError(f"{name}={show_value(value)}: {kind.words} is needed, not {type(value).__name__}")
    if kind is _WHOLE:
        return int(value)
    if isinstance(value, str | os.PathLike):
        if os.PathLike in kind.types:
            check_path(value, _spell(name))
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"{_spell(name)} has a NUL character")
        return value
    if Iterable not in kind.types:
        return value
    values = tuple(islice(value, _MOST_ITEMS + 1))
    if len(values) > _MOST_ITEMS:
        raise InputError(f"{_spell(name)} has more than {_MOST_ITEMS:,} values")
    if kind.items is not None:
        for number, item in enumerate(values):
            check_value(f"{name}[{number}]", item, kind.items)
    return value if isinstance(value, Mapping) else values


def show_value(value: Any) -> str:
    """A wrong value as a message repeats it: at most 80 characters, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of thousands of digits, an object whose __repr__ raises
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name.isidentifier() and name not in ("workload", "logs") else name


def check_count(name: str, value: Any) -> int:
    """Return a whole number. Raises InputError for a value of another type."""
    return cast(int, check_value(name, value, _WHOLE))


def check_call(name: str, signature: inspect.Signature, args: Any, kwargs: Any, request: Any = None) -> None:
    """Raises TypeError for a call of autods.`name` with other arguments. It says which one may have been meant.

    The fields of the `request` have other names, too.
    """
    if unknown := next((each for each in kwargs if each not in signature.parameters), None):
        other = None if request is None else find_by_other_name(unknown, request)
        near = get_close_matches(unknown, signature.parameters, n=1) if other is None else [other.name]
        meant = f": did you mean {near[0]!r}?" if near else f", see help(autods.{name})"
        raise TypeError(f"{name}() has no argument {unknown!r}{meant}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None


def checks_call(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function of the Python API, whose calls are checked by `check_call`."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        check_call(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return checked


def describe_arguments(request: Callable[..., Any]) -> str:
    """The docstring of a function of the Python API that takes these arguments, in the order of its signature."""
    arguments = sorted(fields(cast(Any, request)), key=lambda each: each.kw_only is True)
    lines = [f"{each.name}: {each.metadata['option'].help}" for each in arguments]
    return "\n".join([inspect.cleandoc(request.__doc__ or ""), "", *lines])
