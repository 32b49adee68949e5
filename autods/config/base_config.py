"""Read and check the user's base DeepSpeed config; precision and global batch follow from it and the request."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError
from ..types import WorkloadSource
from ..units import parse_bytes
from .deepspeed import BATCH_KEYS, enabled_half_precision, get_key, merge

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
# The keys at the top of a config that people write (deepspeed/runtime/constants.py and config.py of 0.19).
_KEYS = (
    *BATCH_KEYS, "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint",
    "comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning",
    "data_efficiency", "data_types", "dataloader_drop_last", "disable_allgather", "dump_state", "elasticity",
    "flops_profiler", "fp16", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor",
    "memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "progressive_layer_drop", "scheduler",
    "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel", "tensorboard", "wall_clock_breakdown",
    "wandb", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
# Strings, which stay, and comments; then strings and trailing commas. DeepSpeed reads its files as Hjson.
_NOT_JSON = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|\#[^\n]*|/\*.*?\*/', re.DOTALL)
_GIVE_JSON = "give --base-config a DeepSpeed JSON file"
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def read_base_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file. Comments and trailing commas are skipped, as DeepSpeed skips them.

    Raises InputError that names file, line and column.
    """
    try:
        config = json.loads(
            _strict(path.read_bytes().decode("utf-8-sig")), object_pairs_hook=_each_once, parse_constant=_no_number
        )
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", place=str(path), hint=_GIVE_JSON) from None
    except UnicodeDecodeError:
        raise InputError("is not text", place=str(path), hint=_GIVE_JSON) from None
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise InputError(f"is not JSON: {error.msg}", place=place, hint=_GIVE_JSON) from None
    except _Refused as error:
        problem, hint = error.args
        raise InputError(problem, place=str(path), hint=hint) from None
    if not isinstance(config, dict):
        raise InputError("is JSON but not an object", place=str(path), hint='a DeepSpeed config starts with "{"')
    return config


class _Refused(Exception):
    """The file is JSON but no config. Arguments: the problem, and a hint."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        keys = ", ".join(f'"{key}"' for key in twice)
        raise _Refused(f"has {keys} twice in one section", "DeepSpeed refuses that: keep one of them")
    return dict(pairs)


def _no_number(word: str) -> Any:
    raise _Refused(f"contains {word}, which is not JSON", "give a number, or leave the key out")


def _strict(text: str) -> str:
    """Return strict JSON, with blanks for comments and trailing commas: lines and columns stay the same."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _TRAILING_COMMA.sub(blank, _NOT_JSON.sub(blank, text))


def check_base_config(
    config: Mapping[str, Any], *, world_size: int, place: str = "base config", filled_in: bool = False
) -> None:
    """Raises InputError for settings that exclude each other, with the reason.

    `filled_in` allows "auto", because a library will replace it by the values of its own arguments.
    """
    for key in ("fp16", "bf16", "amp", "zero_optimization", "optimizer", "scheduler"):
        absent = key not in config or (config[key] is None and key in ("optimizer", "scheduler"))
        if not absent and not isinstance(config[key], Mapping):
            raise InputError(f'"{key}" must be an object, not {config[key]!r}', place=place)
    for key in ("fp16", "bf16", "amp"):  # DeepSpeed takes "false" for False, and every other reader for True
        if (enabled := get_key(config, f"{key}.enabled")) not in (None, True, False, "auto"):
            raise InputError(f'"{key}.enabled" is {enabled!r}; it must be true or false', place=place)
    on = [key for key in ("fp16", "bf16", "amp") if _enabled(config, key)]
    stage = get_key(config, "zero_optimization.stage")
    if "amp" in on and (stage or "zero_optimization" in config):
        raise InputError(
            "amp and ZeRO exclude each other: Apex AMP keeps its own copies of what ZeRO shards",
            place=place,
            hint='remove "amp" and use "bf16": {"enabled": true}',
        )
    if "amp" in on:
        raise InputError(
            "amp excludes ZeRO, and every rung but ddp is ZeRO",
            place=place,
            hint='remove "amp" and use "bf16": {"enabled": true}',
        )
    if len(on) > 1:
        raise InputError(
            f"{on[0]} and {on[1]} are both enabled; a model trains in one precision",
            place=place,
            hint='set "enabled": false in one of them',
        )
    for key, (why, hint) in _DECIDE_THEMSELVES.items():
        if get_key(config, key):
            raise InputError(f'"{key.removesuffix(".enabled")}": {why}', place=place, hint=hint)
    if stage is not None and stage not in (0, 1, 2, 3, "auto"):
        raise InputError(f'"zero_optimization.stage" is {stage!r}; ZeRO has the stages 0 to 3', place=place)
    _check_batch(config, world_size, place)
    if not filled_in:
        _check_auto(config, place)


def find_misspelt_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences about unknown keys, which DeepSpeed ignores silently, that resemble one of its own."""
    near = {key: get_close_matches(key, _KEYS, n=1, cutoff=0.85) for key in config if key not in _KEYS}
    return tuple(
        f'DeepSpeed knows no "{key}", so it does nothing: did you mean "{names[0]}"?'
        for key, names in near.items()
        if names
    )


def _check_auto(config: Mapping[str, Any], place: str) -> None:
    """Raises InputError for an "auto" that only the Hugging Face Trainer would replace by a value."""
    inside = [f"{section}.{name}" for section in _AUTO_SECTIONS for name in get_key(config, section) or ()]
    for key in (*(key for key in config if key not in BATCH_KEYS), *inside):
        if get_key(config, key) == "auto":
            raise InputError(
                f'"{key}" is "auto", which only the Hugging Face Trainer fills in',
                place=place,
                hint="give the value to train with, or leave the key out",
            )


def _enabled(config: Mapping[str, Any], key: str) -> bool:
    return get_key(config, f"{key}.enabled") is True


def _check_batch(config: Mapping[str, Any], world_size: int, place: str) -> None:
    sizes = {key: config[key] for key in BATCH_KEYS if config.get(key) not in (None, "auto")}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f'"{key}" is {value!r}; it must be a whole number above 0', place=place)
    total, micro, accumulation = (sizes.get(key) for key in BATCH_KEYS)
    share = (micro or 1) * (accumulation or 1) * world_size
    contradicts = total % share if total and not (micro and accumulation) else total and total != share
    if contradicts:
        product = f"micro batch {micro or '?'} × accumulation {accumulation or '?'} × {world_size} ranks"
        raise InputError(
            f"train_batch_size {total} ≠ {product}",
            place=place,
            hint=_meant_for(total, micro, accumulation)
            + "keep train_batch_size alone: autods solves for the other two",
        )


def _meant_for(total: int | None, micro: int | None, accumulation: int | None) -> str:
    """'those sizes are for 4 ranks; ' when they agree with each other for another number of ranks."""
    if not (total and micro and accumulation) or total % (micro * accumulation):
        return ""
    ranks = total // (micro * accumulation)
    return f"those sizes are for {ranks} rank{'s' if ranks > 1 else ''}; "


Precision = Literal["auto", "bf16", "fp16", "fp32"]
ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None


def load_base_config(given: ConfigSource, *, world_size: int, filled_in: bool = False) -> tuple[dict[str, Any], str]:
    """Return the checked base config, from a file or an object, and its name for messages."""
    place = str(given) if isinstance(given, (str, os.PathLike)) else "base config"
    base = read_base_config(Path(given)) if isinstance(given, (str, os.PathLike)) else _plain(given, place)
    check_base_config(base, world_size=world_size, place=place, filled_in=filled_in)
    return base, place


def resolve_base_config(
    source: WorkloadSource, given: ConfigSource, precision: str, *, world_size: int, otherwise: str = "bf16"
) -> dict[str, Any]:
    """Return the base config with a precision: the one `given`, else the workload's.

    For a script it holds only the keys that win over the script's own config.
    """
    users = source.base_config if given is None else given
    base, place = load_base_config(users, world_size=world_size, filled_in=fills_in_auto(source))
    if source.kind == "script":
        return override_script_config(base, precision, place)
    return add_precision(base, precision, place, otherwise=otherwise)


def parse_size(given: str | int | None, option: str) -> int | None:
    """Return the bytes of '80GiB', or of a number. Raises InputError that names the option."""
    if given is None:
        return None
    try:
        return parse_bytes(str(given))
    except ValueError as error:
        raise InputError(f"{option} {error}") from None


def check_ranks(gpus: int) -> int:
    """Return `gpus`. Raises InputError for fewer than one rank."""
    if gpus < 1:
        raise InputError(f"--gpus {gpus}: at least one rank is needed", hint="give --gpus 1 or more")
    return gpus


def resolve_global_batch(given: int | None, base: Mapping[str, Any], ranks: int) -> int | None:
    """Return the given global batch, else the base config's. Raises InputError where ranks cannot share it evenly."""
    users = base.get("train_batch_size")
    total = given if given is not None else users if isinstance(users, int) else None
    if total is not None and (total < 1 or total % ranks):
        near = max(ranks, total // ranks * ranks)
        raise InputError(
            f"--global-batch {total} cannot be split over {ranks} ranks: "
            "global batch = micro batch × accumulation × ranks",
            hint=f"give a multiple of {ranks}, such as {near} or {near + ranks}",
        )
    return total


def add_precision(base: Mapping[str, Any], precision: str, place: str, *, otherwise: str = "bf16") -> dict[str, Any]:
    """Return the config with a precision: the one that it enables, else `precision`, else `otherwise` for "auto"."""
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise InputError(f"there is no precision {precision!r}", hint="give --precision bf16, fp16 or fp32")
    users = enabled_half_precision(base)
    if precision == "auto":
        return dict(base) if users or "bf16" in base or "fp16" in base else {**base, otherwise: {"enabled": True}}
    if users and users != precision:
        raise InputError(
            f"--precision {precision}, but {users} is enabled there", place=place, hint="drop one of the two"
        )
    return dict(base) if users or precision == "fp32" else {**base, precision: {"enabled": True}}


def override_script_config(base: Mapping[str, Any], precision: str, place: str) -> dict[str, Any]:
    """Return the keys that win over a script's own config; its precision stays unless one is asked for."""
    if precision == "auto":
        return dict(base)
    config = add_precision(base, precision, place)
    off = {name: {"enabled": False} for name in ("bf16", "fp16") if name != enabled_half_precision(config)}
    return merge(config, off)


def merge_script_config(
    source: WorkloadSource, scripts: Mapping[str, Any], over: Mapping[str, Any], *, world_size: int
) -> dict[str, Any]:
    """Return a script's own config with the keys of `over` over it; an "auto" in `over` keeps the script's value."""
    given = {key: value for key, value in over.items() if get_key(over, f"{key}.enabled") != "auto"}
    base = merge(scripts, given)
    place = f"the DeepSpeed config of {source.path}"
    check_base_config(base, world_size=world_size, place=place, filled_in=fills_in_auto(source))
    return base


def fills_in_auto(source: WorkloadSource) -> bool:
    """Whether a library replaces "auto" by values before the config reaches the engine."""
    return source.script_kind in ("hf_trainer", "accelerate")


def parse_precisions(given: str) -> tuple[str, ...]:
    """'bf16,fp32' → ('bf16', 'fp32'). A fit starts with the first; the others may win the race."""
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in names:
        if name not in ("bf16", "fp16", "fp32") and names != ("auto",):
            raise InputError(f"there is no precision {name!r}", hint="give --precision bf16, fp16, fp32, or bf16,fp32")
    return names


def precision_name(base: Mapping[str, Any]) -> str:
    """Return the precision of a config: 'bf16', 'fp16' or 'fp32'."""
    return enabled_half_precision(base) or "fp32"


def _plain(base: Mapping[str, Any] | None, place: str) -> dict[str, Any]:
    """Return a copy as JSON keeps it, so that trials use exactly the values that `ds_config.json` will hold."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(base or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be written as JSON: {error}", place=place) from None
    return copy
