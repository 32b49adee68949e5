"""What is wrong with a DeepSpeed config: refused, ignored, contradicted, harmful or misspelt keys.

`fit`, `plan`, `run` and `probe` refuse a base config by the first error of `SEARCH_RULES`; `explain` shows every
problem of `EXPLAIN_RULES`. A rule is a function of the config that yields problems.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import gcd
from typing import Any, Literal, TypeGuard

from .deepspeed import (
    BATCH_KEYS,
    SEQUENCE_RANKS,
    TENSOR_RANKS,
    count_sharers,
    documented_name,
    enabled_half_precision,
    get_key,
    read_known_keys,
)
from .releases import find_faults, find_removed_keys

Severity = Literal["error", "warning", "note"]
# Sections that hold the arguments of a class, which DeepSpeed looks up by name.
OPEN_SECTIONS = ("optimizer.params", "scheduler.params")
_ZERO = "zero_optimization"
_MEANT = "did you mean"
_PARTS = ("param", "optimizer")
_HALVES = ("fp16", "bf16")
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
_STAGES: Mapping[str, Literal[0, 1, 2, 3]] = {"0": 0, "1": 1, "2": 2, "3": 3}
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
_SMALL_BUCKET = 1_000_000  # elements: 2 MB a message; NCCL reaches its bandwidth from some MB on
_LARGE_BUCKET = 1_000_000_000
# Arguments of the optimizers that DeepSpeed creates (runtime/config.py, engine.py) and of torch's Adam.
_OPTIMIZER_ARGUMENTS = (
    "lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "dampening", "amsgrad", "bias_correction",
    "torch_adam", "adam_w_mode", "fused", "foreach", "capturable", "differentiable", "maximize", "freeze_step",
    "cuda_aware", "comm_backend_name", "max_coeff", "min_coeff", "max_grad_norm", "fp32_optimizer_states", "alpha",
)  # fmt: skip
_SLOW_SWITCHES = {
    "wall_clock_breakdown": "it waits for the GPU several times a step",
    "memory_breakdown": "it waits for the GPU several times a step",
    "comms_logger.enabled": "it waits for the GPU after each collective",
    "flops_profiler.enabled": "it turns wall_clock_breakdown on, which waits for the GPU several times a step",
}
_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_ONLY_NVME = (
    "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something about a key. `error`: DeepSpeed refuses it, or trains something else. `hint` is the way out."""

    severity: Severity
    key: str
    problem: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledKeys:
    """What the installed DeepSpeed, of this version, says about a config.

    `defaults` has every dotted key that it reads, such as 'zero_optimization.stage'; its value is None where nothing is
    set, or where DeepSpeed does not say. `strict` are the sections in which it refuses unknown keys. `replaced` maps
    deprecated keys to their successors. `complaints` are pairs of a dotted key and what DeepSpeed says against it.
    `schedule_arguments` are those of the config's learning-rate schedule; None where DeepSpeed has none of that name.
    `has_optimizer` is False where neither DeepSpeed nor torch has the config's optimizer. `optimizers` and `schedules`
    are the names of DeepSpeed's own.
    """

    version: str
    defaults: Mapping[str, Any]
    strict: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    complaints: tuple[tuple[str, str], ...] = ()
    schedule_arguments: tuple[str, ...] | None = None
    has_optimizer: bool = True
    optimizers: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()


_NOT_ASKED = InstalledKeys(version="", defaults={})  # a search does not wait for the import of DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The config to judge. `ranks` is None where the number of GPUs is not known."""

    config: Mapping[str, Any]
    ranks: int | None = None
    installed: InstalledKeys = _NOT_ASKED

    def get(self, dotted: str) -> Any:
        """The value at a dotted key; None where there is none."""
        return get_key(self.config, dotted)

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section of ZeRO."""
        section = self.config.get(_ZERO)
        return section if isinstance(section, Mapping) else {"stage": 1} if section is True else {}  # an old spelling

    @property
    def stage(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage; 0 where none or no valid one is given. DeepSpeed reads text as a number."""
        return _read_stage(self.zero.get("stage")) or 0

    def offload_device(self, part: str) -> str:
        """Where 'param' or 'optimizer' is offloaded to: 'none', 'cpu' or 'nvme'."""
        return str(self.get(f"{_ZERO}.offload_{part}.device") or "none")


def _read_stage(value: Any) -> Literal[0, 1, 2, 3] | None:
    """The stage as DeepSpeed reads it; None where it refuses the value."""
    return _STAGES.get(str(int(value) if isinstance(value, bool | float) and value in range(4) else value))


Rule = Callable[[Question], Iterator[Problem]]


def find_problems(question: Question, rules: Iterable[Rule]) -> tuple[Problem, ...]:
    """Return all problems, errors first. The first error about a key hides everything else about it."""
    problems = [problem for rule in rules for problem in rule(question)]
    errors = {each.key: each for each in reversed(problems) if each.severity == "error"}
    kept = [each for each in problems if errors.get(each.key, each) is each]
    return tuple(sorted(kept, key=lambda problem: ("error", "warning", "note").index(problem.severity)))


def find_misspelt_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences about unknown keys at the top that resemble one of DeepSpeed's own."""
    known = InstalledKeys(version="", defaults=dict.fromkeys(read_known_keys().top))
    problems = _find_unknown(Question(config=config, installed=known))
    return tuple(f'"{each.key}": {each.problem}; {each.hint}' for each in problems if each.hint.startswith(_MEANT))


def walk_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each (dotted key, value) that is no section, in order. An empty section counts as a value."""
    return ((name, value) for name, value in _walk(config) if not (isinstance(value, Mapping) and value))


def _walk(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each (dotted key, value), those of sections too."""
    for key, value in config.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{key}.")


def keeps_batch_identity(total: int, micro: int | None, accumulation: int | None, ranks: int) -> bool:
    """Whether train batch = micro batch × accumulation × ranks holds, or can where one of the two is left open."""
    each = (micro or 1) * (accumulation or 1) * ranks
    return total == each if micro and accumulation else total % each == 0


def _error(key: str, problem: str, hint: str = "") -> Problem:
    return Problem(severity="error", key=key, problem=problem, hint=hint)


def _warning(key: str, problem: str, hint: str = "") -> Problem:
    return Problem(severity="warning", key=key, problem=problem, hint=hint)


def _note(key: str, problem: str, hint: str = "") -> Problem:
    return Problem(severity="note", key=key, problem=problem, hint=hint)


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


def _shorten(value: Any) -> str:
    """A value in a message: as JSON writes it, and not too long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _suggest(section: str, value: Any) -> str:
    """What to write for a section that is given as a value alone, such as "cpu" or true."""
    key, values = _STARTS.get(section.rpartition(".")[2], ("", ()))
    if value in (None, False, "none") and key != "enabled":
        return "leave it out"
    if not key:
        return f"its keys: {', '.join(inside)}" if (inside := read_known_keys().inside.get(section)) else ""
    given = 1 if section == _ZERO and value is True else value  # DeepSpeed takes true for stage 1
    fits = isinstance(given, str) if key == "type" else (type(given), given) in [(type(each), each) for each in values]
    return f"write {_shorten({key: given if fits else values[0]})}"


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _find_ill_typed(question: Question) -> Iterator[Problem]:
    """Values of the wrong type or range. DeepSpeed fails on most of them with an error that does not name the key."""
    config = question.config
    for key in read_known_keys().tables:
        if key == "bfloat16" and "bf16" in config:
            continue  # then nobody reads the old name
        if key in config and not (isinstance(config[key], Mapping) or (config[key] is None and key in _MAY_BE_NULL)):
            value = config[key]
            is_read = isinstance(value, bool) if key == _ZERO else value is None and key in ("aio", "bf16")
            judge = _warning if is_read else _error  # by DeepSpeed: true is stage 1
            yield judge(key, f'"{key}" must be an object, not {_shorten(value)}', _suggest(key, value))
    for key in ("optimizer", "scheduler"):
        if (params := question.get(f"{key}.params")) is not None and not isinstance(params, Mapping):
            judge = _warning if key == "scheduler" and not question.get("scheduler.type") else _error  # nobody reads it
            yield judge(f"{key}.params", f'"{key}.params" must be an object, not {_shorten(params)}')
        if (name := question.get(f"{key}.type")) is not None and not isinstance(name, str):
            yield _error(f"{key}.type", f'"{key}.type" must be a name, not {_shorten(name)}')
    for half in (*_HALVES, "amp"):  # DeepSpeed takes "false" for False, and every other reader for True
        key = f"{half}.enabled"
        if (enabled := question.get(key)) not in (None, "auto") and not isinstance(enabled, bool):
            yield _warning(key, f'"{key}" is {_shorten(enabled)}; it must be true or false')
    if isinstance(enabled := question.get("flops_profiler.enabled"), str):
        yield _error("flops_profiler.enabled", f'"flops_profiler.enabled" is {_shorten(enabled)}, not true or false')
    for key, default in question.installed.defaults.items():  # DeepSpeed's models read text themselves
        is_switch = isinstance(default, bool) and key.rpartition(".")[0] not in question.installed.strict
        if is_switch and isinstance(text := question.get(key), str) and text != "auto":
            yield _warning(key, f'"{key}" is the text {_shorten(text)}, which is no switch', "write true or false")
    for key, least in _LEAST.items():
        number = question.get(key)
        if number not in (None, "auto") and not (_is_number(number) and number >= least):
            bound = f", at least {least}" if least >= 0 else ""
            divides = key == "steps_per_print" and _is_number(number) and number != 0
            judge = _warning if divides or isinstance(number, bool) else _error  # DeepSpeed takes true for 1
            yield judge(key, f'"{key}" is {_shorten(number)}; it must be a number{bound}')
    for name in question.zero:
        if (other := documented_name(name)) != name and other in question.zero:
            yield _error(f"{_ZERO}.{name}", f'"{name}" and "{other}" are two names of one key', "keep one of them")
    key, stage = f"{_ZERO}.stage", question.get(f"{_ZERO}.stage")
    if stage not in (None, "auto") and (type(stage) is not int or stage not in range(4)):
        read = _read_stage(stage)
        problem = f'"{key}" is {_shorten(stage)}; ZeRO has the stages 0 to 3'
        yield _error(key, problem) if read is None else _warning(key, problem, f"write {read}")
    for key in BATCH_KEYS:
        if (size := config.get(key)) not in (None, "auto") and not _is_count(size):
            judge = _warning if isinstance(size, bool | float) and size > 0 else _error  # DeepSpeed multiplies them
            yield judge(key, f'"{key}" is {_shorten(size)}; it must be a whole number above 0')


def _find_two_precisions(question: Question) -> Iterator[Problem]:
    on = [key for key in (*_HALVES, "amp") if question.get(f"{key}.enabled") is True]
    if len(on) > 1:
        problem = f"{on[0]} and {on[1]} are both enabled; a model trains in one precision"
        yield _error(on[0], problem, 'set "enabled": false in one of them')


def _find_wrong_batch(question: Question) -> Iterator[Problem]:
    """The identity of sizes: train batch = micro batch × accumulation × ranks; those that share a sequence are one."""
    key, sharers = BATCH_KEYS[0], count_sharers(question.config, SEQUENCE_RANKS)
    ranks = None if question.ranks is None else question.ranks // sharers  # AutoTP's count each
    total, micro, accumulation = (size if _is_count(size) else None for size in map(question.config.get, BATCH_KEYS))
    if total is None or ranks == 0:
        return
    each = (micro or 1) * (accumulation or 1)
    fitting_ranks, rest = divmod(total, each)
    is_whole = bool(micro and accumulation and not rest)
    if ranks is None:
        if rest:
            problem = f"{total} is no multiple of micro batch × accumulation = {each}, so no number of GPUs gives it"
            yield _error(key, problem)
        elif is_whole:
            gpus = f"{fitting_ranks} GPUs" if sharers == 1 else f"{fitting_ranks * sharers} GPUs / {sharers}"
            problem = f"{total} = {micro} × {accumulation} × {gpus}; another number of GPUs is refused"
            yield _note(key, problem)
    elif not keeps_batch_identity(total, micro, accumulation, ranks):
        factors = {f"micro batch {micro}": micro, f"accumulation {accumulation}": accumulation, f"{ranks} ranks": ranks}
        product = " × ".join(text for text, factor in factors.items() if factor)
        product += f" ({question.ranks} / {SEQUENCE_RANKS} {sharers})" if sharers > 1 else ""
        fitting_ranks *= sharers
        meant = f"those sizes are for {fitting_ranks} rank{'s' if fitting_ranks > 1 else ''}; " if is_whole else ""
        advice = _advise_batch(total, micro, accumulation, ranks)
        relation = "≠" if micro and accumulation else "is no multiple of"
        yield _error(key, f"{key} {total} {relation} {product}", f"{meant}{advice}")


def _advise_batch(total: int, micro: int | None, accumulation: int | None, ranks: int) -> str:
    """The numbers with which sizes go together that do not."""
    key, each = BATCH_KEYS[0], (micro or 1) * (accumulation or 1) * ranks
    if micro and accumulation:
        return f"write {key} {each}, or leave it out: it is the product of the others"
    size, name = (micro, "micro batch") if micro else (accumulation, "accumulation")
    if size and total % ranks == 0:
        return f"{name} {gcd(size, total // ranks)} goes, or {key} a multiple of {each}"
    below = total // each * each
    near = " or ".join(str(number) for number in (below, below + each) if number)
    return f"write {key} {near}"


def _find_uneven_groups(question: Question) -> Iterator[Problem]:
    """Sizes of groups of ranks that make no whole groups."""
    size = question.config.get(SEQUENCE_RANKS)
    if SEQUENCE_RANKS in question.config and not (_is_number(size) and size >= 1 and size == int(size)):
        judge = _warning if size is True else _error
        yield judge(SEQUENCE_RANKS, f'"{SEQUENCE_RANKS}" is {_shorten(size)}; it must be a whole number above 0')
    ranks, replicas = question.ranks, question.config.get("data_parallel_size")
    for key in (SEQUENCE_RANKS, TENSOR_RANKS):
        each = count_sharers(question.config, key)
        if ranks is not None and ranks % each:
            yield _error(key, f"{ranks} ranks make no groups of {each}", f"give a multiple of {each} GPUs")
    shard = question.zero.get("zero_hpz_partition_size")
    if ranks is not None and question.stage == 3 and _is_count(shard) and ranks % min(shard, ranks):
        key, hint = f"{_ZERO}.zero_hpz_partition_size", "give the GPUs of a node, or another divisor of all GPUs"
        yield _error(key, f"{ranks} ranks make no groups of {shard}", hint)
    each = count_sharers(question.config, SEQUENCE_RANKS)
    if ranks is not None and SEQUENCE_RANKS in question.config and _is_count(replicas) and replicas * each != ranks:
        problem = f"{replicas} × {SEQUENCE_RANKS} {each} = {replicas * each} ranks, and there are {ranks}"
        yield _error("data_parallel_size", problem, f"write {ranks // each}, or leave it out")


def _find_notes_on_groups(question: Question) -> Iterator[Problem]:
    """What DeepSpeed counts in a batch although several ranks train on it, and a size that it does not read."""
    if "data_parallel_size" in question.config and SEQUENCE_RANKS not in question.config:
        yield _note("data_parallel_size", f"DeepSpeed reads it beside {SEQUENCE_RANKS} only")
    if (each := count_sharers(question.config, TENSOR_RANKS)) > 1 and BATCH_KEYS[0] in question.config:
        problem = f"{BATCH_KEYS[0]} counts every rank, and {each} each train on the same samples"
        yield _note(TENSOR_RANKS, problem, f"a step has 1/{each} of it in samples that differ")
        if question.stage == 3 and all(_is_count(question.config.get(key)) for key in BATCH_KEYS):
            problem = f"stage 3 counts {each} ranks of {TENSOR_RANKS} as one, the engine each: no total suits both"
            yield _error(BATCH_KEYS[0], problem, "leave it out: DeepSpeed multiplies the other two")


def _find_refused_groups(question: Question) -> Iterator[Problem]:
    """The same as DeepSpeed sees it: it divides the ranks by those of a sequence, and trains with any part of one."""
    size = question.config.get(SEQUENCE_RANKS)
    is_taken = _is_number(size) and size > 0 and "data_parallel_size" not in question.config
    for problem in _find_uneven_groups(question):
        yield replace(problem, severity="warning") if is_taken and problem.key == SEQUENCE_RANKS else problem


def _find_decided_by_trials(question: Question) -> Iterator[Problem]:
    """Settings with which a search cannot work."""
    for key, (why, hint) in _DECIDED_BY_TRIALS.items():
        if question.get(key):
            yield _error(key, f'"{key.removesuffix(".enabled")}": {why}', hint)


def find_unfilled_auto(question: Question) -> Iterator[Problem]:
    """Each "auto" that only the Hugging Face Trainer would replace by a value, where it does not run."""
    sections = [(section, question.get(section)) for section in _AUTO_SECTIONS]
    inside = [f"{name}.{key}" for name, section in sections if isinstance(section, Mapping) for key in section]
    for key in (*(key for key in question.config if key not in BATCH_KEYS), *inside):
        if question.get(key) == "auto":
            problem = f'"{key}" is "auto", which only the Hugging Face Trainer fills in'
            yield _error(key, problem, "give the value to train with, or leave the key out")


def _find_complaints(question: Question) -> Iterator[Problem]:
    """What DeepSpeed's own models say, and the features that it has removed."""
    for key, complaint in question.installed.complaints:
        if complaint.startswith("Input should be a valid dictionary"):
            value = question.get(key)
            yield _error(key, f'"{key}" must be an object, not {_shorten(value)}', _suggest(key, value))
        else:
            hint = "leave it out" if "has been removed" in complaint else ""
            yield _error(key, complaint, read_known_keys().removed.get(key, hint))


def _find_unknown(question: Question) -> Iterator[Problem]:
    """Keys that DeepSpeed does not know. It refuses them in some sections, and ignores them elsewhere."""
    installed = question.installed
    sections: dict[str, list[str]] = {}  # and the names in each
    homes: dict[str, str | None] = {}  # of each name, the section that knows it; None where several do
    for key in installed.defaults:
        section, _, last = key.rpartition(".")
        sections.setdefault(section, []).append(last)
        homes[last] = (section or "the top") if last not in homes else None
    left = _MOST_COMPARED
    for name, _ in _walk(question.config):
        section, _, last = name.rpartition(".")
        if name in installed.defaults or section not in sections or name.startswith(OPEN_SECTIONS):
            continue  # an unknown section itself is reported, or DeepSpeed does not say what belongs there
        hint = "leave it out"
        if home := homes.get(last):
            hint = f'it belongs into "{home}"'
        elif (left := left - 1) >= 0 and (near := _find_near(last, sections[section], section)):
            hint = f'{_MEANT} "{near}"?'
        if section in installed.strict:
            yield _error(name, "DeepSpeed refuses a key that it does not know", hint)
        else:
            yield _warning(name, "DeepSpeed knows no such key and ignores it", hint)
    for section, arguments in zip(
        OPEN_SECTIONS, (_OPTIMIZER_ARGUMENTS, installed.schedule_arguments or ()), strict=True
    ):
        given = question.get(section)
        for name in list(given)[:_MOST_COMPARED] if arguments and isinstance(given, Mapping) else ():
            if name not in arguments and (near := _find_near(name, arguments, section)):
                owner = question.get(section.replace("params", "type"))
                judge = _warning if str(owner).lower() == "muon" else _error  # Muon ignores what it does not know
                yield judge(f"{section}.{name}", f"{owner} takes no such argument", f'{_MEANT} "{near}"?')


def _find_contradictions(question: Question) -> Iterator[Problem]:
    if all(question.config.get(key) is None for key in BATCH_KEYS):
        yield _error(BATCH_KEYS[0], "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu")
    for part in _PARTS:
        if question.offload_device(part) == "nvme" and not question.get(f"{_ZERO}.offload_{part}.nvme_path"):
            yield _error(f"{_ZERO}.offload_{part}", "NVMe has no nvme_path", "name a folder on the disk")
    if question.offload_device("optimizer") == "nvme" and question.stage in (1, 2):
        problem = "only stage 3 swaps optimizer states to NVMe"
        yield _error(f"{_ZERO}.offload_optimizer.device", problem, "take cpu, or stage 3")
    optimizer, schedule = question.get("optimizer.type"), question.get("scheduler.type")
    if not question.installed.has_optimizer:
        yield _error("optimizer.type", f"neither DeepSpeed nor torch.optim has {optimizer!r}", "AdamW, say")
    if schedule is not None and question.installed.schedule_arguments is None:
        yield _error("scheduler.type", f"DeepSpeed has no schedule {schedule!r}")
    lr, top = question.get("optimizer.params.lr"), question.get("scheduler.params.warmup_max_lr")
    if isinstance(lr, int | float) and isinstance(top, int | float) and lr != top:
        problem = f"the schedule goes to {top}, whatever optimizer.params.lr ({lr}) says"
        yield _warning("scheduler.params.warmup_max_lr", problem, "give one value to both")
    warm, total = (question.get(f"scheduler.params.{name}") for name in ("warmup_num_steps", "total_num_steps"))
    if isinstance(warm, int) and isinstance(total, int) and warm >= total:
        problem = f"the warm-up ({warm}) is as long as the training ({total})"
        yield _error("scheduler.params.warmup_num_steps", problem)


def _find_deprecated(question: Question) -> Iterator[Problem]:
    for name, _ in walk_keys(question.config):
        if successor := question.installed.replaced.get(name):
            yield _warning(name, "DeepSpeed has deprecated it", f'give "{successor}" instead')
    if "bfloat16" in question.config:
        yield _warning("bfloat16", "the old name of bf16", 'write "bf16"')


def _find_ignored(question: Question) -> Iterator[Problem]:
    """Keys that have no effect because of another one."""
    stages, stage = read_known_keys().zero_optimization, question.stage
    for name in question.zero:
        if name in stages and stage not in stages[name]:
            obeying = ", ".join(str(each) for each in stages[name])
            yield _note(f"{_ZERO}.{name}", f"stage {stage} ignores it; it is for stage {obeying}", "leave it out")
    for part, least in (("param", 3), ("optimizer", 1)):
        if question.offload_device(part) != "none" and stage < least:
            hint = f"take stage {least}" + (" or more" if least < 3 else "")
            yield _warning(f"{_ZERO}.offload_{part}", f"stage {stage} has nothing to offload here", hint)
    fp16 = question.get("fp16")
    if isinstance(fp16, Mapping):
        if not fp16.get("enabled"):
            yield from _note_idle("fp16", [name for name in fp16 if name != "enabled"], "fp16 is off")
        elif fp16.get("loss_scale") not in (None, 0, "auto"):
            adapting = [name for name in fp16 if name in _DYNAMIC_SCALE]
            problem = f"loss_scale {fp16['loss_scale']} is fixed"
            yield from _note_idle("fp16", adapting, problem, "give loss_scale 0 to adapt it")
    devices = {part: question.offload_device(part) for part in _PARTS}
    for part, device in devices.items():
        section = question.get(f"{_ZERO}.offload_{part}")
        if isinstance(section, Mapping) and device != "nvme":
            swapping = [name for name in section if name in _ONLY_NVME]
            yield from _note_idle(f"{_ZERO}.offload_{part}", swapping, f"the device is {device}, not NVMe")
    if "aio" in question.config and "nvme" not in devices.values():
        yield _note("aio", "nothing is offloaded to NVMe, so it has no effect")


def _note_idle(section: str, names: Sequence[str], reason: str, hint: str = "") -> Iterator[Problem]:
    """One note on keys of a section that have no effect for the same reason."""
    if names:
        have = "they have" if len(names) > 1 else "it has"
        yield _note(f"{section}.{_name_first(names)}", f"{reason}, so {have} no effect", hint)


def _name_first(names: Sequence[str]) -> str:
    """'overlap_comm and 2 more'."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _find_auto(question: Question) -> Iterator[Problem]:
    defaults = question.installed.defaults
    names = [name for name, value in walk_keys(question.config) if value == "auto" and defaults.get(name) != "auto"]
    if names:
        problem = '"auto" is filled in by the Hugging Face Trainer and accelerate only'
        yield _note(_name_first(names), problem, "elsewhere give a value")


def _find_sizes_that_hurt(question: Question) -> Iterator[Problem]:
    """Buckets that are too small or too large."""
    stages, stage = read_known_keys().zero_optimization, question.stage
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        size = question.zero.get(name)
        if not _is_number(size) or stage not in stages[name]:
            continue
        problem = None
        if 0 < size < _SMALL_BUCKET:
            problem = f"{size:,.0f} elements make many small messages, whose latency decides"
        elif size > _LARGE_BUCKET:
            problem = f"a buffer of {size:,.0f} elements is more than most GPUs can spare"
        if problem is not None:
            yield _warning(f"{_ZERO}.{name}", problem, "1e7 to 5e8 are usual")
    name = "stage3_param_persistence_threshold"
    if stage == 3 and question.zero.get(name) == 0:
        problem = "even biases and norms are collected for each use, in many tiny messages"
        yield _warning(f"{_ZERO}.{name}", problem, "1e4 to 1e6 are usual")


def _find_harmful(question: Question) -> Iterator[Problem]:
    """Switches that DeepSpeed takes, and that hurt speed or memory."""
    stage = question.stage
    for part in _PARTS:
        name = f"{_ZERO}.offload_{part}.pin_memory"
        if question.offload_device(part) != "none" and question.get(name) is False:
            problem = "copies from unpinned memory are slower, and wait for each other"
            yield _warning(name, problem, "true, if host memory allows it")
    if stage and question.zero.get("contiguous_gradients") is False:
        problem = "gradients of all sizes stay where they appear, which fragments the device's memory"
        yield _warning(f"{_ZERO}.contiguous_gradients", problem, "leave it true")
    if stage in (1, 2) and question.zero.get("reduce_scatter") is False:
        problem = "each GPU receives all averaged gradients, about twice the bytes"
        yield _warning(f"{_ZERO}.reduce_scatter", problem, "leave it true")
    for name, problem in _SLOW_SWITCHES.items():
        if question.get(name) is True:
            yield _warning(name, problem, "turn it off for real training")
    halves = [question.get(f"{name}.enabled") for name in (*_HALVES, "torch_autocast")]
    if enabled_half_precision(question.config) is None and True not in halves and "auto" not in halves:
        problem = "no half precision is enabled: fp32 takes twice the memory, and is several times slower"
        yield _warning("bf16", problem, 'give "bf16": {"enabled": true}')
    if stage == 0 and _ZERO in question.config:
        yield _note(f"{_ZERO}.stage", "stage 0 is plain data parallelism: every GPU holds all states")
    clips_at = question.installed.defaults.get("gradient_clipping")
    if "gradient_clipping" not in question.config and clips_at:
        problem = f"it is not given, and this DeepSpeed clips at {clips_at} then"
        yield _note("gradient_clipping", problem, "0 turns clipping off")


def _find_removed(question: Question) -> Iterator[Problem]:
    """Keys that the installed release refuses because their feature is gone. `explain` has DeepSpeed's own words."""
    for key, hint in find_removed_keys().items():
        section, _, name = key.rpartition(".")
        holder = question.get(section) if section else question.config
        if isinstance(holder, Mapping) and name in holder:
            yield _error(key, f'"{key}": DeepSpeed has removed it, and refuses the config', hint)


def _find_unchosen(question: Question) -> Iterator[Problem]:
    """Features that are not for the ladder, so that no fit compares rungs with and without them."""
    for row, reason in read_known_keys().unchosen.items():
        key, _, wanted = row.partition("=")
        value = question.get(key)
        if value and wanted in str(value).lower():
            yield _note(key, f"no fit chooses it: {reason}", "try it by hand against the config that a fit finds")


SEARCH_RULES: tuple[Rule, ...] = (
    _find_ill_typed,
    _find_decided_by_trials,
    _find_removed,
    _find_two_precisions,
    _find_uneven_groups,
    _find_wrong_batch,
)


def _find_release_faults(question: Question) -> Iterator[Problem]:
    """What the installed release does wrong, or slowly, at this stage, and no error shows."""
    for fault in find_faults(question.installed.version):
        if fault.concerns(question.stage, enabled_half_precision(question.config) or "fp32", question.config):
            severity: Severity = "error" if fault.effect == "wrong" else "warning"
            text = fault.describe(question.installed.version)
            yield Problem(severity=severity, key=fault.key, problem=text, hint=fault.remedy)


EXPLAIN_RULES: tuple[Rule, ...] = (
    _find_release_faults,
    _find_unchosen,
    _find_complaints,
    _find_ill_typed,
    _find_unknown,
    _find_two_precisions,
    _find_refused_groups,
    _find_wrong_batch,
    _find_notes_on_groups,
    _find_contradictions,
    _find_ignored,
    _find_deprecated,
    _find_sizes_that_hurt,
    _find_harmful,
    _find_auto,
)
