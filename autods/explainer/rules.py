"""What is wrong with a DeepSpeed config: refused, ignored, contradicted, harmful or misspelt keys.

Each rule is a function of the config that yields findings; `RULES` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..config.base_config import keeps_batch_identity
from ..config.deepspeed import BATCH_KEYS, enabled_half_precision, get_key, read_known_keys
from ..report.explanation import Finding
from .schema import OPEN_SECTIONS, Key, Schema

_ZERO = "zero_optimization"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The config to judge. `ranks` is None where the number of GPUs is not known."""

    config: Mapping[str, Any]
    schema: Schema
    ranks: int | None = None

    def get(self, dotted: str) -> Any:
        """The value at a dotted key; None where there is none."""
        return get_key(self.config, dotted)

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section of ZeRO."""
        section = self.config.get(_ZERO)
        return section if isinstance(section, Mapping) else {}

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 where none or no valid one is given."""
        stage = self.zero.get("stage", 0)
        return stage if stage in (0, 1, 2, 3) and not isinstance(stage, bool) else 0

    def offload_device(self, part: str) -> str:
        """Where 'param' or 'optimizer' is offloaded to: 'none', 'cpu' or 'nvme'."""
        return str(self.get(f"{_ZERO}.offload_{part}.device") or "none")


def find_problems(question: Question) -> tuple[Finding, ...]:
    """Return all findings, errors first. An error about a key hides warnings and notes about it."""
    findings = [finding for rule in RULES for finding in rule(question)]
    wrong = {finding.key for finding in findings if finding.severity == "error"}
    kept = [finding for finding in findings if finding.severity == "error" or finding.key not in wrong]
    return tuple(sorted(dict.fromkeys(kept), key=lambda finding: ("error", "warning", "note").index(finding.severity)))


def walk_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each (dotted key, value) that is no section, in order. An empty section counts as a value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from walk_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _find_unknown(question: Question) -> Iterator[Finding]:
    """Keys that DeepSpeed does not know. It refuses them in some sections, and ignores them elsewhere."""
    schema = question.schema
    for name in _all_names(question.config):
        section, _, last = name.rpartition(".")
        if name in schema.keys or section in OPEN_SECTIONS or any(name.startswith(f"{s}.") for s in OPEN_SECTIONS):
            continue
        if section and section not in schema.sections:
            continue  # the section itself is reported, or DeepSpeed does not say what belongs there
        near = get_close_matches(last, schema.within(section), n=1, cutoff=0.6)
        homes = [key for key in schema.keys if key.rpartition(".")[2] == last]
        hint = f'did you mean "{near[0]}"?' if near else "leave it out"
        if homes:
            hint = f'it belongs into "{homes[0].rpartition(".")[0] or "the top"}"'
        if section in schema.strict:
            yield Finding(
                severity="error", key=name, problem="DeepSpeed refuses a key that it does not know", hint=hint
            )
        else:
            yield Finding(severity="warning", key=name, problem="DeepSpeed knows no such key and ignores it", hint=hint)
    for section, known in (
        ("optimizer.params", _OPTIMIZER_ARGUMENTS),
        ("scheduler.params", question.schema.schedule_arguments or ()),
    ):
        for name in question.get(section) or () if known else ():
            if name not in known and (near := get_close_matches(name, known, n=1, cutoff=0.7)):
                problem = f"{question.get(section.replace('params', 'type'))} takes no such argument"
                yield Finding(
                    severity="error", key=f"{section}.{name}", problem=problem, hint=f'did you mean "{near[0]}"?'
                )


def _all_names(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each dotted name, those of sections too."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _all_names(value, f"{prefix}{key}.")


def _find_refused(question: Question) -> Iterator[Finding]:
    """Values of the wrong type or range, as DeepSpeed's own models judge them, and removed features."""
    for name, key in question.schema.keys.items():
        if "." not in name and name in question.config:
            if key.removed:
                yield Finding(severity="error", key=name, problem=_first_sentence(key), hint="leave it out")
            elif name in question.schema.sections and not isinstance(question.config[name], Mapping):
                problem = f"it must be an object, not {question.config[name]!r}"
                yield Finding(severity="error", key=name, problem=problem, hint='write {"enabled": true}, say')
    for name, complaint in question.schema.complaints:
        yield Finding(severity="error", key=name, problem=complaint)
    for name in BATCH_KEYS:
        size = question.config.get(name)
        if size not in (None, "auto") and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            yield Finding(severity="error", key=name, problem=f"it must be a whole number above 0, not {size!r}")


def _first_sentence(key: Key) -> str:
    return key.removed.split(". ")[0].rstrip(".")


def _find_deprecated(question: Question) -> Iterator[Finding]:
    for name, _ in walk_keys(question.config):
        key = question.schema.keys.get(name)
        if key is not None and key.deprecated:
            hint = f'give "{key.replaced_by}" instead'
            yield Finding(severity="warning", key=name, problem="DeepSpeed has deprecated it", hint=hint)
    if "bfloat16" in question.config:
        yield Finding(severity="warning", key="bfloat16", problem="the old name of bf16", hint='write "bf16"')


def _find_ignored(question: Question) -> Iterator[Finding]:
    """Keys that have no effect because of another one."""
    stages, stage = read_known_keys().zero_optimization, question.stage
    for name in question.zero:
        if name in stages and stage not in stages[name]:
            obeying = ", ".join(str(each) for each in stages[name])
            problem = f"stage {stage} ignores it; it is for stage {obeying}"
            yield Finding(severity="note", key=f"{_ZERO}.{name}", problem=problem, hint="leave it out")
    for part, least in (("param", 3), ("optimizer", 1)):
        if question.offload_device(part) != "none" and stage < least:
            hint = f"take stage {least}" + (" or more" if least < 3 else "")
            problem = f"stage {stage} has nothing to offload here"
            yield Finding(
                severity="error" if stage else "warning", key=f"{_ZERO}.offload_{part}", problem=problem, hint=hint
            )
    fp16 = question.get("fp16")
    if isinstance(fp16, Mapping):
        off, fixed = not fp16.get("enabled"), fp16.get("loss_scale") not in (None, 0, "auto")
        for name in fp16:
            if off and name != "enabled":
                yield Finding(severity="note", key=f"fp16.{name}", problem="fp16 is off, so it has no effect")
            elif fixed and name in _DYNAMIC_SCALE:
                problem = f"loss_scale {fp16['loss_scale']} is fixed, so it has no effect"
                yield Finding(
                    severity="note", key=f"fp16.{name}", problem=problem, hint="give loss_scale 0 to adapt it"
                )
    for part in ("param", "optimizer"):
        section = question.get(f"{_ZERO}.offload_{part}")
        if isinstance(section, Mapping) and question.offload_device(part) != "nvme":
            only_nvme = (
                "nvme_path",
                "buffer_count",
                "buffer_size",
                "max_in_cpu",
                "pipeline_read",
                "pipeline_write",
                "fast_init",
            )
            for name in section:
                if name in only_nvme:
                    problem = f"only NVMe uses it, and the device is {question.offload_device(part)}"
                    yield Finding(severity="note", key=f"{_ZERO}.offload_{part}.{name}", problem=problem)
    if "aio" in question.config and "nvme" not in (
        question.offload_device("param"),
        question.offload_device("optimizer"),
    ):
        yield Finding(severity="note", key="aio", problem="nothing is offloaded to NVMe, so it has no effect")


def _find_contradictions(question: Question) -> Iterator[Finding]:
    on = [name for name in ("fp16", "bf16", "torch_autocast") if question.get(f"{name}.enabled") is True]
    if {"fp16", "bf16"} <= set(on):
        yield Finding(
            severity="error",
            key="fp16",
            problem="fp16 and bf16 are both enabled",
            hint="a model trains in one: drop one",
        )
    if question.get("amp.enabled") and question.stage:
        yield Finding(
            severity="error",
            key="amp",
            problem="amp and ZeRO exclude each other: Apex keeps its own copies of what ZeRO splits",
            hint='give "bf16": {"enabled": true}',
        )
    for part in ("param", "optimizer"):
        if question.offload_device(part) == "nvme" and not question.get(f"{_ZERO}.offload_{part}.nvme_path"):
            name = f"{_ZERO}.offload_{part}"
            yield Finding(severity="error", key=name, problem="NVMe has no nvme_path", hint="name a folder on the disk")
    if question.offload_device("optimizer") == "nvme" and question.stage in (1, 2):
        problem = "only stage 3 swaps optimizer states to NVMe"
        yield Finding(
            severity="error", key=f"{_ZERO}.offload_optimizer.device", problem=problem, hint="take cpu, or stage 3"
        )
    yield from _find_wrong_batch(question)
    if not question.schema.has_optimizer:
        problem = f"neither DeepSpeed nor torch.optim has {question.get('optimizer.type')!r}"
        yield Finding(severity="error", key="optimizer.type", problem=problem, hint="AdamW, say")
    schedule = question.get("scheduler.type")
    if schedule is not None and question.schema.schedule_arguments is None:
        yield Finding(severity="error", key="scheduler.type", problem=f"DeepSpeed has no schedule {schedule!r}")
    lr, top = question.get("optimizer.params.lr"), question.get("scheduler.params.warmup_max_lr")
    if isinstance(lr, int | float) and isinstance(top, int | float) and lr != top:
        problem = f"the schedule goes to {top}, whatever optimizer.params.lr ({lr}) says"
        yield Finding(
            severity="warning", key="scheduler.params.warmup_max_lr", problem=problem, hint="give one value to both"
        )
    warm, total = (question.get(f"scheduler.params.{name}") for name in ("warmup_num_steps", "total_num_steps"))
    if isinstance(warm, int) and isinstance(total, int) and warm >= total:
        problem = f"the warm-up ({warm}) is as long as the training ({total})"
        yield Finding(severity="error", key="scheduler.params.warmup_num_steps", problem=problem)


def _find_wrong_batch(question: Question) -> Iterator[Finding]:
    """The identity of sizes: train batch = micro batch × accumulation × GPUs."""
    sizes = [question.config.get(name) for name in BATCH_KEYS]
    total, micro, accumulation = (size if isinstance(size, int) else None for size in sizes)
    if sizes == [None, None, None]:
        problem = "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu"
        yield Finding(severity="error", key=BATCH_KEYS[0], problem=problem)
        return
    if total is None:
        return
    each = (micro or 1) * (accumulation or 1)
    ranks = question.ranks
    if ranks is None:
        if total % each:
            problem = f"{total} is no multiple of micro batch × accumulation = {each}, so no number of GPUs gives it"
            yield Finding(severity="error", key=BATCH_KEYS[0], problem=problem)
        elif micro and accumulation:
            problem = f"{total} = {micro} × {accumulation} × {total // each} GPUs; another number of GPUs is refused"
            yield Finding(severity="note", key=BATCH_KEYS[0], problem=problem)
        return
    if not keeps_batch_identity(total, micro, accumulation, ranks):
        problem = f"{total} ≠ micro batch {micro or '?'} × accumulation {accumulation or '?'} × {ranks} GPUs"
        hint = "keep train_batch_size and the micro batch: DeepSpeed solves for the accumulation"
        yield Finding(severity="error", key=BATCH_KEYS[0], problem=problem, hint=hint)


def _find_auto(question: Question) -> Iterator[Finding]:
    names = [name for name, value in walk_keys(question.config) if value == "auto"]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        problem = '"auto" is filled in by the Hugging Face Trainer and accelerate only'
        yield Finding(severity="note", key=f"{names[0]}{more}", problem=problem, hint="elsewhere give a value")


def _find_sizes_that_hurt(question: Question) -> Iterator[Finding]:
    """Buckets that are too small or too large."""
    stages, stage = read_known_keys().zero_optimization, question.stage
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        size = question.zero.get(name)
        if not isinstance(size, int | float) or isinstance(size, bool) or stage not in stages[name]:
            continue
        problem = None
        if 0 < size < _SMALL_BUCKET:
            problem = f"{size:,.0f} elements make many small messages, whose latency decides"
        elif size > _LARGE_BUCKET:
            problem = f"a buffer of {size:,.0f} elements is more than most GPUs can spare"
        if problem is not None:
            yield Finding(severity="warning", key=f"{_ZERO}.{name}", problem=problem, hint="1e7 to 5e8 are usual")
    name = "stage3_param_persistence_threshold"
    if stage == 3 and question.zero.get(name) == 0:
        problem = "even biases and norms are collected for each use, in many tiny messages"
        yield Finding(severity="warning", key=f"{_ZERO}.{name}", problem=problem, hint="1e4 to 1e6 are usual")


def _find_harmful(question: Question) -> Iterator[Finding]:
    """Switches that DeepSpeed takes, and that hurt speed or memory."""
    stage = question.stage
    for part in ("param", "optimizer"):
        if question.offload_device(part) != "none" and question.get(f"{_ZERO}.offload_{part}.pin_memory") is False:
            problem = "copies from unpinned memory are slower, and wait for each other"
            name = f"{_ZERO}.offload_{part}.pin_memory"
            yield Finding(severity="warning", key=name, problem=problem, hint="true, if host memory allows it")
    if stage and question.zero.get("contiguous_gradients") is False:
        problem = "gradients of all sizes stay where they appear, which fragments the device's memory"
        yield Finding(severity="warning", key=f"{_ZERO}.contiguous_gradients", problem=problem, hint="leave it true")
    if stage in (1, 2) and question.zero.get("reduce_scatter") is False:
        problem = "each GPU receives all averaged gradients, about twice the bytes"
        yield Finding(severity="warning", key=f"{_ZERO}.reduce_scatter", problem=problem, hint="leave it true")
    for name, problem in _SLOW_SWITCHES.items():
        if question.get(name) is True:
            yield Finding(severity="warning", key=name, problem=problem, hint="turn it off for real training")
    halves = [question.get(f"{name}.enabled") for name in ("fp16", "bf16", "torch_autocast")]
    if enabled_half_precision(question.config) is None and True not in halves and "auto" not in halves:
        problem = "no half precision is enabled: fp32 takes twice the memory, and is several times slower"
        yield Finding(severity="warning", key="bf16", problem=problem, hint='give "bf16": {"enabled": true}')
    if stage == 0 and _ZERO in question.config:
        problem = "stage 0 is plain data parallelism: every GPU holds all states"
        yield Finding(severity="note", key=f"{_ZERO}.stage", problem=problem)
    clipping = question.schema.keys.get("gradient_clipping")
    if "gradient_clipping" not in question.config and clipping is not None and clipping.default:
        problem = f"it is not given, and this DeepSpeed clips at {clipping.default} then"
        yield Finding(severity="note", key="gradient_clipping", problem=problem, hint="0 turns clipping off")


RULES: tuple[Callable[[Question], Iterator[Finding]], ...] = (
    _find_unknown,
    _find_refused,
    _find_contradictions,
    _find_ignored,
    _find_deprecated,
    _find_sizes_that_hurt,
    _find_harmful,
    _find_auto,
)
