"""Read and check the user's base DeepSpeed config; precision and global batch follow from it and the request."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

from ..errors import InputError
from ..files import read_text
from ..requests import ConfigSource, show_value
from ..schema import check_plain, parse_json
from ..types import MOST_RANKS, Device, WorkloadSource
from ..units import parse_bytes
from .deepspeed import BATCH_KEYS, enabled_half_precision, get_key, merge, read_known_keys

_AUTO_SECTIONS = ("optimizer.params", "scheduler.params", "bf16", "fp16")
# Sections that decide what a trial has to decide: key → the conflict, the way out.
_DECIDE_THEMSELVES = {
    "zero_optimization.zenflow": (
        "ZenFlow sets the accumulation itself (update_interval) and needs an offloaded optimizer, so rungs with and "
        "without it do not train the same",
        "leave it out here, and add it to the config that is found",
    ),
    "elasticity.enabled": (
        "elastic training solves for the batch itself, against the one that a trial asks for",
        "leave it out here, and give --global-batch",
    ),
    "autotuning.enabled": (
        "DeepSpeed Autotuning is a search of its own: its engines end after their measurement",
        "leave it out",
    ),
}
# Strings, which stay, and comments; then strings and trailing commas. DeepSpeed reads its files as Hjson.
# A string or comment without an end is one match, too: a search for each end would take minutes in a large file.
_NOT_JSON = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|\#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_GIVE_JSON = "give --base-config a DeepSpeed JSON file"
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"?|,(?=\s*[}\]])')


def read_base_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file. Comments and trailing commas are skipped, as DeepSpeed skips them.

    Raises InputError that names file, line and column.
    """
    place = str(path)

    def blank(match: re.Match[str]) -> str:  # so that lines and columns stay the same
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    def read_section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [f'"{key}"' for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            hint = "DeepSpeed refuses that: keep one of them"
            raise InputError(f"has {', '.join(twice)} twice in one section", place=place, hint=hint)
        return dict(pairs)

    def refuse_number(word: str) -> Any:
        hint = "give a number, or leave the key out"
        raise InputError(f"contains {word}, which is not JSON", place=place, hint=hint)

    text = _TRAILING_COMMA.sub(blank, _NOT_JSON.sub(blank, read_text(path, hint=_GIVE_JSON)))
    config = parse_json(
        text,
        place=place,
        hint=_GIVE_JSON,
        finite=True,
        object_pairs_hook=read_section,
        parse_constant=refuse_number,
    )
    if not isinstance(config, dict):
        raise InputError("is JSON but not an object", place=place, hint='a DeepSpeed config starts with "{"')
    return config


def check_base_config(
    config: Mapping[str, Any], *, world_size: int, place: str = "base config", filled_in: bool = False
) -> None:
    """Raises InputError for settings that exclude each other, with the reason.

    `filled_in` allows "auto", because a library will replace it by the values of its own arguments.
    """
    for problem, hint in chain(_find_problems(config, world_size), () if filled_in else _find_auto(config)):
        raise InputError(problem, place=place, hint=hint)


# A problem and the way out of it.
Problem = tuple[str, str | None]
_MAY_BE_NULL = ("optimizer", "scheduler")
# Keys whose value is an object. DeepSpeed fails on another one with an error that does not name the key.
_SECTIONS = (
    *("fp16", "bf16", "amp", "zero_optimization", "optimizer", "scheduler", "activation_checkpointing", "aio"),
    *("autotuning", "bfloat16", "checkpoint", "comms_logger", "compile", "compression_training", "csv_monitor"),
    *("curriculum_learning", "data_efficiency", "data_types", "elasticity", "flops_profiler", "progressive_layer_drop"),
    *("sparse_attention", "tensor_parallel", "tensorboard", "torch_autocast", "wandb"),
)
# Numbers and their least value, on which DeepSpeed or an optimizer fails in the middle of a step, or not at all.
_NUMBERS = {
    "gradient_clipping": float("-inf"), "steps_per_print": 1, "optimizer.params.lr": 0, "optimizer.params.eps": 0,
    "optimizer.params.weight_decay": 0,
}  # fmt: skip


def _shorten(value: Any) -> str:
    """A value in a message: as JSON writes it, and not too long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _find_problems(config: Mapping[str, Any], world_size: int) -> Iterator[Problem]:
    """Yield problems. A later check relies on the earlier ones, so only the first problem is certain."""
    for key in _SECTIONS:
        absent = key not in config or (config[key] is None and key in _MAY_BE_NULL)
        if not absent and not isinstance(config[key], Mapping):
            yield f'"{key}" must be an object, not {_shorten(config[key])}', None
    for key in ("optimizer", "scheduler"):
        if (params := get_key(config, f"{key}.params")) is not None and not isinstance(params, Mapping):
            yield f'"{key}.params" must be an object, not {_shorten(params)}', None
        if (name := get_key(config, f"{key}.type")) is not None and not isinstance(name, str):
            yield f'"{key}.type" must be a name, not {_shorten(name)}', None
    for key in ("fp16", "bf16", "amp"):  # DeepSpeed takes "false" for False, and every other reader for True
        if (enabled := get_key(config, f"{key}.enabled")) not in (None, "auto") and not isinstance(enabled, bool):
            yield f'"{key}.enabled" is {_shorten(enabled)}; it must be true or false', None
    on = [key for key in ("fp16", "bf16", "amp") if get_key(config, f"{key}.enabled") is True]
    if "amp" in on:
        why = "amp excludes ZeRO, and every rung but ddp is ZeRO"
        if "zero_optimization" in config:
            why = "amp and ZeRO exclude each other: Apex AMP keeps its own copies of what ZeRO shards"
        yield why, 'remove "amp" and use "bf16": {"enabled": true}'
    if len(on) > 1:
        yield (
            f"{on[0]} and {on[1]} are both enabled; a model trains in one precision",
            'set "enabled": false in one of them',
        )
    for key, (why, hint) in _DECIDE_THEMSELVES.items():
        if get_key(config, key):
            yield f'"{key.removesuffix(".enabled")}": {why}', hint
    for key, least in _NUMBERS.items():
        number = get_key(config, key)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if number not in (None, "auto") and not (is_number and number >= least):
            yield (
                f'"{key}" is {_shorten(number)}; it must be a number{f", at least {least}" if least >= 0 else ""}',
                None,
            )
    stage = get_key(config, "zero_optimization.stage")
    if stage not in (None, "auto") and (type(stage) is not int or stage not in range(4)):
        yield f'"zero_optimization.stage" is {_shorten(stage)}; ZeRO has the stages 0 to 3', None

    sizes = {key: config[key] for key in BATCH_KEYS if config.get(key) not in (None, "auto")}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f'"{key}" is {_shorten(value)}; it must be a whole number above 0', None
    total, micro, accumulation = (sizes.get(key) for key in BATCH_KEYS)
    each = (micro or 1) * (accumulation or 1)
    is_whole = bool(micro and accumulation)
    if total and not keeps_batch_identity(total, micro, accumulation, world_size):
        product = f"micro batch {micro or '?'} × accumulation {accumulation or '?'} × {world_size} ranks"
        ranks, rest = divmod(total, each)
        meant = f"those sizes are for {ranks} rank{'s' if ranks > 1 else ''}; " if is_whole and not rest else ""
        hint = f"{meant}keep train_batch_size alone: autods solves for the other two"
        yield f"train_batch_size {total} ≠ {product}", hint


def keeps_batch_identity(total: int, micro: int | None, accumulation: int | None, ranks: int) -> bool:
    """Whether train batch = micro batch × accumulation × ranks holds, or can where one of the two is left open."""
    each = (micro or 1) * (accumulation or 1) * ranks
    return total == each if micro and accumulation else total % each == 0


def _find_auto(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each "auto" that only the Hugging Face Trainer would replace by a value."""
    inside = [f"{section}.{name}" for section in _AUTO_SECTIONS for name in get_key(config, section) or ()]
    for key in (*(key for key in config if key not in BATCH_KEYS), *inside):
        if get_key(config, key) == "auto":
            problem = f'"{key}" is "auto", which only the Hugging Face Trainer fills in'
            yield problem, "give the value to train with, or leave the key out"


def find_misspelt_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences about unknown keys, which DeepSpeed ignores silently, that resemble one of its own."""
    keys = read_known_keys()
    known = (*BATCH_KEYS, "zero_optimization", *keys.scalars, *keys.sections, *keys.others)
    near = {key: get_close_matches(key, known, n=1, cutoff=0.85) for key in config if key not in known}
    return tuple(
        f'DeepSpeed knows no "{key}", so it does nothing: did you mean "{names[0]}"?'
        for key, names in near.items()
        if names
    )


def resolve_base_config(
    source: WorkloadSource, given: ConfigSource | None, precision: str, *, world_size: int, bf16: bool
) -> dict[str, Any]:
    """Return the base config with a precision: the one `given`, else the workload's. Raises InputError.

    The precision is the one that the config enables, else `precision`. For "auto" it is bf16, or fp16 where not `bf16`:
    the device cannot compute in it. For a script the config holds only the keys that win over the script's own; its
    precision stays unless one is asked for.
    """
    users = source.base_config if given is None else given
    place = str(users) if isinstance(users, (str, os.PathLike)) else "base config"
    if isinstance(users, (str, os.PathLike)):
        base = read_base_config(Path(users))
    else:
        try:  # a copy as JSON keeps it, so that trials use exactly the values that `ds_config.json` will hold
            base = json.loads(json.dumps(dict(users or {}), allow_nan=False))
            check_plain(base)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"cannot be written as JSON: {error}", place=place) from None
    check_base_config(base, world_size=world_size, place=place, filled_in=fills_in_auto(source))
    if precision != "auto":
        _check_precision(precision)
    enabled = enabled_half_precision(base)
    if precision == "auto":
        is_open = source.kind != "script" and not {"bf16", "fp16"} & set(base)
        return {**base, "bf16" if bf16 else "fp16": {"enabled": True}} if is_open else base
    if enabled and enabled != precision:
        problem = f"--precision {precision}, but {enabled} is enabled there"
        raise InputError(problem, place=place, hint="drop one of the two")
    config = base if enabled or precision == "fp32" else {**base, precision: {"enabled": True}}
    if source.kind != "script":
        return config
    return merge(config, {half: {"enabled": False} for half in ("bf16", "fp16") if half != precision})


def merge_script_config(
    source: WorkloadSource, scripts: Mapping[str, Any], over: Mapping[str, Any], *, world_size: int
) -> dict[str, Any]:
    """Return a script's own config with the keys of `over` over it; an "auto" in `over` keeps the script's value."""
    base = merge(scripts, {key: value for key, value in over.items() if get_key(over, f"{key}.enabled") != "auto"})
    place = f"the DeepSpeed config of {source.path}"
    check_base_config(base, world_size=world_size, place=place, filled_in=fills_in_auto(source))
    return base


def fills_in_auto(source: WorkloadSource) -> bool:
    """Whether a library replaces "auto" by values before the config reaches the engine."""
    return source.script_kind in ("hf_trainer", "accelerate")


def resolve_global_batch(
    given: int | None, base: Mapping[str, Any], ranks: int, *, replicas: int | None = None
) -> int | None:
    """Return the given global batch, else the base config's. Raises InputError where ranks cannot share it evenly.

    A base config without train_batch_size implies micro batch × accumulation × `replicas`, as DeepSpeed computes it.
    The replicas of the model are None until they are known: the ranks of a pipeline share one.
    """
    users, micro, accumulation = (base.get(key) for key in BATCH_KEYS)
    total = given if given is not None else users if isinstance(users, int) else None
    if total is None and replicas is not None and isinstance(micro, int) and isinstance(accumulation, int):
        return micro * accumulation * replicas
    if total is not None and (total < 1 or total % ranks):
        near = max(ranks, total // ranks * ranks)
        raise InputError(
            f"--global-batch {total} cannot be split over {ranks} ranks: "
            "global batch = micro batch × accumulation × ranks",
            hint=f"give a multiple of {ranks}, such as {near} or {near + ranks}",
        )
    return total


def precision_name(base: Mapping[str, Any]) -> str:
    """Return the precision of a config: 'bf16', 'fp16' or 'fp32'."""
    return enabled_half_precision(base) or "fp32"


def parse_precisions(given: str) -> tuple[str, ...]:
    """'bf16,fp32' → ('bf16', 'fp32'). A fit starts with the first; the others may win the race."""
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    if names != ("auto",):
        for name in names:
            _check_precision(name)
    return names


def _check_precision(name: str) -> None:
    if name not in ("bf16", "fp16", "fp32"):
        hint = "give --precision bf16, fp16 or fp32; a fit races several: bf16,fp32"
        raise InputError(f"there is no precision {name!r}", hint=hint)


def parse_size(given: str | int | None, option: str) -> int | None:
    """Return the bytes of '80GiB', or of a number. Raises InputError that names the option."""
    if given is None:
        return None
    try:
        return parse_bytes(str(given))
    except ValueError as error:
        raise InputError(f"{option} {error}") from None


def parse_device(device: str) -> Device:
    """Return the kind of device. Raises InputError for another word."""
    if device not in get_args(Device):
        raise InputError(f"there is no device {device!r}", hint="give --device cuda or --device cpu")
    return cast(Device, device)


def check_ranks(gpus: int, nodes: int = 1) -> int:
    """Return `gpus`. Raises InputError for none or too many, and for ranks that the nodes cannot share evenly."""
    if gpus < 1:
        raise InputError(f"--gpus {show_value(gpus)}: at least one rank is needed", hint="give --gpus 1 or more")
    if gpus > MOST_RANKS:
        raise InputError(f"--gpus {show_value(gpus)}: {MOST_RANKS:,} ranks are the most")
    if gpus % nodes:
        raise InputError(f"--gpus {gpus} are all ranks; they cannot be split evenly over {nodes} nodes")
    return gpus
