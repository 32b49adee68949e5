"""Read and check the user's base DeepSpeed config; precision and global batch follow from it and the request."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import plain_text
from ..arguments import ConfigSource, show_value
from ..errors import InputError
from ..files import read_text
from ..schema import check_plain, parse_json
from ..types import MOST_RANKS, WorkloadSource
from ..units import format_bytes, parse_bytes
from .deepspeed import (
    BATCH_KEYS,
    SEQUENCE_RANKS,
    TENSOR_RANKS,
    count_sharers,
    enabled_half_precision,
    get_key,
    leave_out_auto,
    merge,
    names_precision,
    use_documented_names,
)
from .key_rules import find_unfilled_auto
from .library_configs import (
    are_training_arguments,
    fill_in_arguments,
    is_of_accelerate,
    is_yaml,
    make_accelerates_config,
    read_yaml_config,
)
from .problems import Question, find_named_keys, find_problems, shorten
from .trainers import find_library
from .validator import SEARCH_RULES

# Strings, which stay, and comments; then strings and trailing commas. DeepSpeed reads its files as Hjson.
# A string or comment without an end is one match, too: a search for each end would take minutes in a large file.
_NOT_JSON = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|\#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_GIVE_JSON = "give a DeepSpeed JSON file"
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"?|,(?=\s*[}\]])')


def read_base_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file, or the config in a file of accelerate's or of the Hugging Face Trainer's.

    Raises InputError that names file, line and column.
    """
    if is_yaml(path):
        return read_yaml_config(path, _read_json)
    config = _read_json(path)
    if is_of_accelerate(config):
        return make_accelerates_config(config, path, _read_json)
    return fill_in_arguments(config, path, _read_json) if are_training_arguments(config) else config


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Comments and trailing commas are skipped, as DeepSpeed does."""
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
    rules = SEARCH_RULES if filled_in else (*SEARCH_RULES, find_unfilled_auto)
    for problem in find_problems(Question(config=config, ranks=world_size), rules):
        raise InputError(problem.problem, place=place, hint=problem.hint or None)


def find_config_place(source: WorkloadSource, given: ConfigSource | None) -> str | None:
    """Return the file of the base config, the workload where that holds it, or 'base config'; None without one."""
    users = source.base_config if given is None else given
    if users is None:
        return None
    if isinstance(users, (str, os.PathLike)):
        return str(users)
    return "base config" if given is not None else source.place


# DeepSpeed's sections are models of pydantic, which says: N validation errors for MODEL KEY COMPLAINT [type=…].
_OF_A_MODEL = re.compile(r"\d+ validation errors? for \w+\s+(?P<key>\S+)\s+(?P<complaint>.+?)\s+\[type=", re.DOTALL)
_ERROR_TYPE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ")
_SAYS_NO_KEY = "the configuration was refused"  # how the advice on any refused config begins


def explain_refusal(
    config: Mapping[str, Any], message: str, *, place: str, hint: str | None = None
) -> InputError | None:
    """Return DeepSpeed's refusal of a base config as an error about its key; None where it names no key of it.

    `message` is its exception with the type, and `hint` what is known beside it.
    """
    text = _ERROR_TYPE.sub("", message)
    refused = _OF_A_MODEL.search(text)
    complaint = refused["complaint"].removeprefix("Value error, ") if refused else text
    key = next(find_named_keys(config, refused["key"] if refused else text), None)
    if key is None:
        return None
    value = get_key(config, key)
    if str(value) not in complaint:
        complaint = f"{complaint.rstrip('.')}; it is {shorten(value)}"
    if hint is None or hint.startswith(_SAYS_NO_KEY):
        hint = "correct the key there, or leave it out; autods explain checks the whole config"
    return InputError(complaint if key in complaint else f"{key}: {complaint}", place=place, hint=hint)


def copy_as_json(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a config as JSON keeps it: what trains has exactly the values that `ds_config.json` will hold.

    Raises InputError for values that JSON does not have, and for what is nested too deeply.
    """
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(config), allow_nan=False))
        check_plain(copy)
    except Exception as error:  # of JSON's, or of a mapping of the user's
        reason = plain_text.read_text(error) or type(error).__name__
        raise InputError(f"cannot be written as JSON: {reason}", place=place) from None
    return copy


def _set_sequence_ranks(base: dict[str, Any], sharers: int, world_size: int, place: str) -> None:
    """Put --sequence-parallel into the config. Raises InputError where that, or the number of ranks, contradicts it."""
    if world_size % sharers:
        problem = f"--sequence-parallel {sharers}: the number of ranks, {world_size}, is no multiple of it"
        raise InputError(problem, hint=f"give --gpus {max(sharers, world_size // sharers * sharers)}, say")
    if (users := base.setdefault(SEQUENCE_RANKS, sharers)) != sharers:
        problem = f"--sequence-parallel {sharers}, but {SEQUENCE_RANKS} is {users} there"
        raise InputError(problem, place=place, hint="drop one of the two")


def resolve_base_config(
    source: WorkloadSource, given: ConfigSource | None, precision: str, *, world_size: int, bf16: bool
) -> dict[str, Any]:
    """Return the base config with a precision: the one `given`, else the workload's. Raises InputError.

    The precision is the one that the config enables, else `precision`. For "auto" it is bf16, or fp16 where not `bf16`:
    the device cannot compute in it. For a script the config holds only the keys that win over the script's own; its
    precision stays unless one is asked for, which also decides what is "auto" there.
    """
    users = source.base_config if given is None else given
    place = find_config_place(source, given) or "base config"
    base = read_base_config(Path(users)) if isinstance(users, (str, os.PathLike)) else copy_as_json(users or {}, place)
    if source.sequence_parallel is not None:
        _set_sequence_ranks(base, source.sequence_parallel, world_size, place)
    check_base_config(base, world_size=world_size, place=place, filled_in=fills_in_auto(source))
    base = use_documented_names(base)
    if precision != "auto":
        _check_precision(precision)
    enabled = enabled_half_precision(leave_out_auto(base))
    if precision == "auto":
        is_open = not source.form.chooses_precision and not names_precision(base)
        return {**base, "bf16" if bf16 else "fp16": {"enabled": True}} if is_open else base
    if enabled and enabled != precision:
        problem = f"--precision {precision}, but {enabled} is enabled there"
        raise InputError(problem, place=place, hint="drop one of the two")
    config = base if enabled or precision == "fp32" else merge(base, {precision: {"enabled": True}})
    if not source.form.chooses_precision:
        return config
    return merge(config, {half: {"enabled": False} for half in ("bf16", "fp16") if half != precision})


def merge_script_config(
    source: WorkloadSource, scripts: Mapping[str, Any], over: Mapping[str, Any], *, world_size: int
) -> dict[str, Any]:
    """Return a script's own config with the keys of `over` over it; an "auto" in `over` keeps the script's value."""
    base = merge(
        use_documented_names(scripts),
        {key: value for key, value in over.items() if get_key(over, f"{key}.enabled") != "auto"},
    )
    place = f"the DeepSpeed config of {source.path}"
    check_base_config(base, world_size=world_size, place=place, filled_in=fills_in_auto(source))
    return base


def fills_in_auto(source: WorkloadSource) -> bool:
    """Whether a library replaces "auto" by values before the config reaches the engine."""
    library = find_library(source)
    return library is not None and library.fills_in_auto


def resolve_global_batch(
    given: int | None, base: Mapping[str, Any], replicas: int, *, all_known: bool = False
) -> int | None:
    """Return the given global batch, else the base config's. Raises InputError where ranks cannot share it evenly.

    `replicas` is the data-parallel size (`count_replicas`). With `all_known` it is final, and a base config without
    train_batch_size implies micro batch × accumulation × `replicas`, as DeepSpeed computes it.
    """
    users, micro, accumulation = (base.get(key) for key in BATCH_KEYS)
    total = given if given is not None else users if isinstance(users, int) else None
    if given is None and total is not None:
        total //= count_sharers(base, TENSOR_RANKS)  # DeepSpeed's counts each of them
    if total is None and all_known and isinstance(micro, int) and isinstance(accumulation, int):
        return micro * accumulation * replicas
    if total is not None and (total < 1 or total % replicas):
        near = max(replicas, total // replicas * replicas)
        sharers = count_sharers(base)
        noun = "rank" if sharers == 1 else "group"
        ranks = f"{replicas} {noun}{'s' if replicas > 1 else ''}"
        ranks += f" of {sharers} ranks that train on the same samples" if sharers > 1 else ""
        raise InputError(
            f"--global-batch {total} cannot be split over {ranks}: global batch = micro batch × accumulation × {noun}s",
            hint=f"give a multiple of {replicas}, such as {near} or {near + replicas}",
        )
    return total


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


_LEAST_BYTES = 2**20


def parse_size(given: str | int | None, option: str) -> int | None:
    """Return the bytes of '80GiB', or of a number. Raises InputError that names the option, also below 1 MiB."""
    if given is None:
        return None
    try:
        size = parse_bytes(str(given))
    except ValueError as error:
        raise InputError(f"{option} {error}") from None
    if size < _LEAST_BYTES:
        lacks_unit = str(given).strip().isdecimal()
        hint = f"give a unit: {option} {size}GiB, say" if lacks_unit else "give 1MiB or more"
        raise InputError(f"{option} {given} is {format_bytes(size)}, and no model fits into that", hint=hint)
    return size


def check_global_batch(given: int | None) -> None:
    """Raises InputError for a global batch that no number of ranks can have."""
    if given is not None and given < 1:
        problem = f"--global-batch {show_value(given)}: at least one sample is needed"
        raise InputError(problem, hint="give a multiple of the number of ranks")


def check_ranks(gpus: int, nodes: int = 1) -> int:
    """Return `gpus`. Raises InputError for none or too many, and for ranks that the nodes cannot share evenly."""
    if gpus < 1:
        raise InputError(f"--gpus {show_value(gpus)}: at least one rank is needed", hint="give --gpus 1 or more")
    if gpus > MOST_RANKS:
        raise InputError(f"--gpus {show_value(gpus)}: {MOST_RANKS:,} ranks are the most")
    if gpus % nodes:
        raise InputError(f"--gpus {gpus} are all ranks; they cannot be split evenly over {nodes} nodes")
    return gpus
