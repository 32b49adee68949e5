"""Rules about each key by itself: unknown, misspelt, of the wrong type, removed, deprecated, or not for a search."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .deepspeed import BATCH_KEYS, HALVES, documented_name, read_known_keys
from .library_configs import FIELDS_OF_ACCELERATE
from .problems import (
    PARTS,
    ZERO,
    InstalledKeys,
    Problem,
    Question,
    error,
    is_count,
    is_number,
    name_first,
    read_stage,
    shorten,
    walk_keys,
    walk_sections,
    warning,
)
from .releases import find_removed_keys

# Sections that hold the arguments of a class, which DeepSpeed looks up by name.
OPEN_SECTIONS = ("optimizer.params", "scheduler.params")
_EVERYDAY_NAMES = ("autotuning", "data_efficiency")  # sections with keys such as seed, which others write elsewhere
_MEANT = "did you mean"
_LEAVE_OUT = "leave it out"
_IGNORED = "DeepSpeed knows no such key and ignores it"
_MOST_IGNORED = 6  # keys that get a warning each
# What a section starts with: its first key, and values of it, the usual one first. A "type" may be any text.
_STARTS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "zero_optimization": ("stage", (2, 0, 1, 3)), "offload_param": ("device", ("cpu", "nvme")),
    "offload_optimizer": ("device", ("cpu", "nvme")), "optimizer": ("type", ("AdamW",)),
    "scheduler": ("type", ("WarmupLR",)),
} | dict.fromkeys((
    "fp16", "bf16", "bfloat16", "torch_autocast", "amp", "flops_profiler", "comms_logger", "tensorboard", "wandb",
    "csv_monitor", "comet", "autotuning", "elasticity", "hybrid_engine", "data_efficiency", "curriculum_learning",
    "progressive_layer_drop",
), ("enabled", (True, False, "auto")))  # fmt: skip
_MAY_BE_NULL = ("optimizer", "scheduler")
# Numbers and their least value, on which DeepSpeed or an optimizer fails in the middle of a step, or not at all.
_LEAST = {
    "gradient_clipping": float("-inf"), "steps_per_print": 1, "optimizer.params.lr": 0, "optimizer.params.eps": 0,
    "optimizer.params.weight_decay": 0,
}  # fmt: skip
# Sections that decide what a trial has to decide: key → the conflict, the way out.
_DECIDED_BY_TRIALS = {
    "amp.enabled": (
        "amp and ZeRO exclude each other, and every rung but ddp is ZeRO",
        'remove "amp" and use "bf16": {"enabled": true}',
    ),
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
# Where "auto" needs a library that fills it in. Of ZeRO's keys the rungs and the growing decide.
_AUTO_SECTIONS = ("optimizer.params", "scheduler.params", "bf16", "fp16")
# Names that other libraries, or earlier releases, have for a key. They look nothing like it.
_CALLED_ELSEWHERE = {
    "aio.thread_count": "intra_op_parallelism", "wandb.entity": "team",
    "optimizer.params.learning_rate": "lr", "optimizer.params.epsilon": "eps", "optimizer.params.adam_epsilon": "eps",
    "scheduler.params.num_training_steps": "total_num_steps", "scheduler.params.num_warmup_steps": "warmup_num_steps",
    "scheduler.params.warmup_steps": "warmup_num_steps",
}  # fmt: skip
# Arguments of the optimizers that DeepSpeed creates (runtime/config.py, engine.py) and of torch's Adam.
_OPTIMIZER_ARGUMENTS = (
    "lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "dampening", "amsgrad", "bias_correction",
    "torch_adam", "adam_w_mode", "fused", "foreach", "capturable", "differentiable", "maximize", "freeze_step",
    "cuda_aware", "comm_backend_name", "max_coeff", "min_coeff", "fp32_optimizer_states", "alpha",
)  # fmt: skip


def find_misspelt_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences about unknown keys at the top that resemble one of DeepSpeed's own."""
    known = InstalledKeys(version="", defaults=dict.fromkeys(read_known_keys().top))
    problems = find_unknown(Question(config=config, installed=known))
    return tuple(f'"{each.key}": {each.problem}; {each.hint}' for each in problems if each.hint.startswith(_MEANT))


_MOST_COMPARED = 500  # unknown keys whose spelling is compared, which takes half a millisecond each
_LONGEST_COMPARED = 100  # characters


def _find_near(name: str, known: Iterable[str], section: str = "") -> str | None:
    """The known name that another one may mean. At the top, where libraries have keys of their own, it is nearer.

    A name that starts with an underscore is a comment, or a key that its user has put out of use.
    """
    if len(name) > _LONGEST_COMPARED or name.startswith("_"):
        return None
    known = list(known)
    begun = [each for each in known if "_" in name and each.startswith(f"{name}_")]
    near = get_close_matches(name, known, n=1, cutoff=0.7 if section else 0.85)
    return begun[0] if len(begun) == 1 else next(iter(near), None)


def _split_words(name: str) -> frozenset[str]:
    """The words of a key, so that fp16_enabled and load_universal_checkpoint find fp16.enabled and their like."""
    return frozenset(name.replace(".", "_").lower().split("_"))


def _list_ends(key: str) -> Iterator[str]:
    """Yield the key and its ends, from its section's last part on; nothing of a key at the top."""
    while "." in key:
        yield key
        _, _, key = key.partition(".")


def _suggest(section: str, value: Any) -> str:
    """What to write for a section that is given as a value alone, such as "cpu" or true."""
    key, values = _STARTS.get(section.rpartition(".")[2], ("", ()))
    if value in (None, "none") or (value is False and key != "enabled"):
        return "leave it out"
    if not key:
        return f"its keys: {', '.join(inside)}" if (inside := read_known_keys().inside.get(section)) else ""
    given = 1 if section == ZERO and value is True else value  # DeepSpeed takes true for stage 1
    fits = isinstance(given, str) if key == "type" else (type(given), given) in [(type(each), each) for each in values]
    return f"write {shorten({key: given if fits else values[0]})}"


def find_references(question: Question) -> Iterator[Problem]:
    """Values that OmegaConf looks up elsewhere, such as "${trainer.micro_batch}"."""
    for key, value in walk_keys(question.config):
        if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
            problem = f"{shorten(value)} is a reference, which Hydra or OmegaConf resolves and DeepSpeed does not"
            yield error(key, problem, "give its value, or the config that the script prints with --cfg job --resolve")


def find_ill_typed(question: Question) -> Iterator[Problem]:
    """Values of the wrong type or range. DeepSpeed fails on most of them with an error that does not name the key."""
    config = question.config
    for key in read_known_keys().tables:
        if key == "bfloat16" and "bf16" in config:
            continue  # then nobody reads the old name
        if key in config and not (isinstance(config[key], Mapping) or (config[key] is None and key in _MAY_BE_NULL)):
            value = config[key]
            is_read = isinstance(value, bool) if key == ZERO else value is None and key in ("aio", "bf16")
            is_read |= key == "expert_parallel" and not value
            judge = warning if is_read else error  # by DeepSpeed: true is stage 1
            yield judge(key, f'"{key}" must be an object, not {shorten(value)}', _suggest(key, value))
    for key in ("optimizer", "scheduler"):
        if (params := question.get(f"{key}.params")) is not None and not isinstance(params, Mapping):
            judge = warning if key == "scheduler" and not question.get("scheduler.type") else error  # nobody reads it
            yield judge(f"{key}.params", f'"{key}.params" must be an object, not {shorten(params)}')
        if (name := question.get(f"{key}.type")) is not None and not isinstance(name, str):
            yield error(f"{key}.type", f'"{key}.type" must be a name, not {shorten(name)}')
    for half in (*HALVES, "amp"):  # DeepSpeed takes "false" for False, and every other reader for True
        key = f"{half}.enabled"
        if (enabled := question.get(key)) not in (None, "auto") and not isinstance(enabled, bool):
            text = str(enabled).lower()
            hint = f"write {text}" if text in ("true", "false") else ""
            yield warning(key, f'"{key}" is {shorten(enabled)}; it must be true or false', hint)
    if isinstance(enabled := question.get("flops_profiler.enabled"), str):
        yield error("flops_profiler.enabled", f'"flops_profiler.enabled" is {shorten(enabled)}, not true or false')
    for key, default in question.installed.defaults.items():  # DeepSpeed's models read text themselves
        is_switch = isinstance(default, bool) and key.rpartition(".")[0] not in question.installed.strict
        if is_switch and isinstance(text := question.get(key), str) and text != "auto":
            yield warning(key, f'"{key}" is the text {shorten(text)}, which is no switch', "write true or false")
    for key in _list_unrehearsed_numbers(question):
        problem = f'"{key}" is {shorten(question.get(key))}; it must be a number'
        yield error(key, problem, _mend_number(question, key))
    for key, least in _LEAST.items():
        number = question.get(key)
        if number is None and question.has(key) and key != "steps_per_print":  # DeepSpeed compares it in a step
            hint = "write 0 to turn clipping off" if key == "gradient_clipping" else _LEAVE_OUT
            yield error(key, f'"{key}" is null; it must be a number', hint)
        if number not in (None, "auto") and not (is_number(number) and number >= least):
            bound = f", at least {least}" if least >= 0 else ""
            # Some optimizers refuse a number below 0, and some train with it: the engine tells. DeepSpeed divides by
            # steps_per_print, and takes true for 1.
            is_taken = is_number(number) and (key != "steps_per_print" or number != 0)
            judge = warning if is_taken or isinstance(number, bool) else error
            yield judge(key, f'"{key}" is {shorten(number)}; it must be a number{bound}', _mend_number(question, key))
    for name in question.zero:
        if (other := documented_name(name)) != name and other in question.zero:
            yield error(f"{ZERO}.{name}", f'"{name}" and "{other}" are two names of one key', "keep one of them")
    key, stage = f"{ZERO}.stage", question.get(f"{ZERO}.stage")
    if stage not in (None, "auto") and (type(stage) is not int or stage not in range(4)):
        read = read_stage(stage)
        problem = f'"{key}" is {shorten(stage)}; ZeRO has the stages 0 to 3'
        yield error(key, problem) if read is None else warning(key, problem, f"write {read}")
    for key in BATCH_KEYS:
        if (size := config.get(key)) not in (None, "auto") and not is_count(size):
            judge = warning if isinstance(size, bool | float) and size > 0 else error  # DeepSpeed multiplies them
            yield judge(
                key, f'"{key}" is {shorten(size)}; it must be a whole number above 0', _mend_number(question, key)
            )


def _list_unrehearsed_numbers(question: Question) -> Iterator[str]:
    """Yield the keys with text or null for a number, in sections that DeepSpeed reads and a toy engine does not."""
    swaps = any(question.offload_device(part) == "nvme" for part in PARTS)
    for section in (
        *(["flops_profiler"] if question.get("flops_profiler.enabled") else []),
        *(["aio"] if swaps else []),
    ):
        given = question.get(section)
        for name, value in given.items() if isinstance(given, Mapping) else ():
            default = question.installed.defaults.get(f"{section}.{name}")
            if type(default) in (int, float) and (value is None or isinstance(value, str)):
                yield f"{section}.{name}"


def find_refused_arguments(question: Question) -> Iterator[Problem]:
    """Arguments of an optimizer that the engine refuses, whichever optimizer it creates."""
    if question.has(key := "optimizer.params.max_grad_norm"):
        yield error(key, f'"{key}": DeepSpeed refuses it', 'write "gradient_clipping" at the top in place of it')


def find_decided_by_trials(question: Question) -> Iterator[Problem]:
    """Settings with which a search cannot work."""
    for key, (why, hint) in _DECIDED_BY_TRIALS.items():
        if question.get(key):
            yield error(key, f'"{key.removesuffix(".enabled")}": {why}', hint)


def find_unfilled_auto(question: Question) -> Iterator[Problem]:
    """Each "auto" that only the Hugging Face Trainer would replace by a value, where it does not run."""
    sections = [(section, question.get(section)) for section in _AUTO_SECTIONS]
    inside = [f"{name}.{key}" for name, section in sections if isinstance(section, Mapping) for key in section]
    for key in (*(key for key in question.config if key not in BATCH_KEYS), *inside):
        if question.get(key) == "auto":
            problem = f'"{key}" is "auto", which only the Hugging Face Trainer fills in'
            yield error(key, problem, "give the value to train with, or leave the key out")


def find_complaints(question: Question) -> Iterator[Problem]:
    """What DeepSpeed's own models say, and the features that it has removed."""
    for key, complaint in question.installed.complaints:
        if complaint.startswith("Input should be a valid dictionary"):
            value = question.get(key)
            yield error(key, f'"{key}" must be an object, not {shorten(value)}', _suggest(key, value))
            continue
        hint = _LEAVE_OUT if "has been removed" in complaint else _mend_number(question, key)
        complaint = re.sub(r", (\w+) or \1\b", r" or \1", complaint)  # an enum has two names for its last value
        if complaint.startswith("Input should be") and (value := question.get(key)) is not None:
            complaint = f"{complaint}; it is {shorten(value)}"
        yield error(key, complaint, read_known_keys().removed.get(key, hint))


def _mend_number(question: Question, key: str) -> str:
    """What to write for null, for a number that is text, and for a fraction where whole numbers are; "" for others."""
    section, _, name = key.rpartition(".")
    holder = question.get(section) if section else question.config
    if not isinstance(holder, Mapping) or name not in holder:
        return ""
    if (value := holder[name]) is None:
        return _LEAVE_OUT
    default = question.installed.defaults.get(key)
    if isinstance(value, float) and type(default) is int and not value.is_integer():
        return f"write {default}, the default, or another whole number"
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return ""
    return f"write {int(number) if number.is_integer() else number}" if math.isfinite(number) else ""


def find_unknown(question: Question) -> Iterator[Problem]:
    """Keys that DeepSpeed does not know. It refuses them in some sections, and ignores them elsewhere."""
    installed = question.installed
    sections: dict[str, list[str]] = {}  # and the names in each
    homes: dict[str, str | None] = {}  # of each name, the section that knows it, or ""; None where several do
    for key in installed.defaults:
        section, _, last = key.rpartition(".")
        sections.setdefault(section, []).append(last)
        if not section.startswith(_EVERYDAY_NAMES):
            homes[last] = section if last not in homes else None
    by_words = {_split_words(end): key for key in installed.defaults for end in _list_ends(key)}
    left, ignored = _MOST_COMPARED, list[str]()
    for name in _list_unknown(question):
        section, _, last = name.rpartition(".")
        meant = None
        if other := _CALLED_ELSEWHERE.get(name):
            meant = f'{_MEANT} "{other}"?'
        elif (home := homes.get(last)) is not None and last != section:  # "fp16" inside "fp16" belongs nowhere
            meant = f'it belongs into "{home}"' if home else "it belongs at the top"
        elif other := FIELDS_OF_ACCELERATE.get(name) or by_words.get(_split_words(name)):
            place, _, key = other.rpartition(".")
            meant = f'{_MEANT} "{key}" in "{place}"?'
        elif isinstance(inside := question.get(name), Mapping) and not section and set(inside) & set(sections[""]):
            at_top = [f'"{key}"' for key in inside if key in sections[""]]
            whose = "its keys belong" if len(at_top) == len(inside) else f"of its keys only {', '.join(at_top)} belong"
            meant = f"{whose} at the top"
        elif (left := left - 1) >= 0 and (near := _find_near(last, sections[section], section)):
            meant = f'{_MEANT} "{near}"?'
        if section in installed.strict:
            yield error(name, "DeepSpeed refuses a key that it does not know", meant or _LEAVE_OUT)
        elif meant is None:
            ignored.append(name)
        else:
            yield warning(name, _IGNORED, meant)
    yield from _warn_ignored(ignored)
    for section, arguments in zip(
        OPEN_SECTIONS, (_OPTIMIZER_ARGUMENTS, installed.schedule_arguments or ()), strict=True
    ):
        given = question.get(section)
        if section == OPEN_SECTIONS[0] and not installed.has_optimizer:
            continue  # the name of the optimizer is wrong, and tells nothing of its arguments
        for name in list(given)[:_MOST_COMPARED] if arguments and isinstance(given, Mapping) else ():
            if name in arguments:
                continue
            if near := _CALLED_ELSEWHERE.get(f"{section}.{name}") or _find_near(name, arguments, section):
                owner = question.get(section.replace("params", "type"))
                judge = warning if str(owner).lower() == "muon" else error  # Muon ignores what it does not know
                yield judge(f"{section}.{name}", f"{owner} takes no such argument", f'{_MEANT} "{near}"?')


def find_ignored(question: Question) -> frozenset[str]:
    """Return the keys and sections that DeepSpeed does not know and ignores."""
    strict = question.installed.strict
    return frozenset(name for name in _list_unknown(question) if name.rpartition(".")[0] not in strict)


def _list_unknown(question: Question) -> Iterator[str]:
    """Yield the keys that DeepSpeed does not know, where it says what belongs; of an unknown section its name alone."""
    known = question.installed.defaults
    sections = {key.rpartition(".")[0] for key in known}
    for name, _ in walk_sections(question.config):
        if name not in known and name.rpartition(".")[0] in sections and not name.startswith(OPEN_SECTIONS):
            yield name


def _warn_ignored(names: Sequence[str]) -> Iterator[Problem]:
    """A warning on each key that DeepSpeed ignores; one on all, where they are so many that the file is not its own."""
    if len(names) <= _MOST_IGNORED:
        for name in names:
            yield warning(name, _IGNORED, _LEAVE_OUT)
        return
    hint = "if they are another program's, give the config that it passes to DeepSpeed in place of this file"
    yield warning(name_first(names), f"DeepSpeed ignores {len(names)} keys that it does not know", hint)


def find_deprecated(question: Question) -> Iterator[Problem]:
    """Keys with a successor."""
    for name, value in walk_keys(question.config):
        if successor := question.installed.replaced.get(name):
            hint = read_known_keys().deprecated.get(name, f'write "{documented_name(successor)}"')
            yield warning(name, "DeepSpeed has deprecated it", "leave it out" if value is False else hint)
    if "bfloat16" in question.config:
        yield warning("bfloat16", "the old name of bf16", 'write "bf16"')


def find_removed(question: Question) -> Iterator[Problem]:
    """Keys that the installed release refuses because their feature is gone. `explain` has DeepSpeed's own words."""
    for key, hint in find_removed_keys().items():
        if question.has(key):
            yield error(key, f'"{key}": DeepSpeed has removed it, and refuses the config', hint)
