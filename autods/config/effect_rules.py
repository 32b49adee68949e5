"""Rules about what a config does: contradictions, keys without effect, switches and sizes that hurt, known faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .deepspeed import (
    BATCH_KEYS,
    GATHER,
    HALVES,
    decides_gathering,
    enabled_half_precision,
    precision_name,
    read_known_keys,
)
from .problems import PARTS, ZERO, Problem, Question, Severity, error, is_number, name_first, note, walk_keys, warning
from .releases import find_faults

_SMALL_BUCKET = 1_000_000  # elements: 2 MB a message; NCCL reaches its bandwidth from some MB on
_LARGE_BUCKET = 1_000_000_000
_SLOW_SWITCHES = {
    "wall_clock_breakdown": "it waits for the GPU several times a step",
    "memory_breakdown": "it waits for the GPU several times a step",
    "flops_profiler.enabled": "it turns wall_clock_breakdown on, which waits for the GPU several times a step",
}
_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_WITHOUT_SCATTER = {
    "optimizer.type": "Muon", "prescale_gradients": "it", "gradient_predivide_factor": "a factor other than 1",
}  # fmt: skip
_ONLY_NVME = (
    "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init",
)  # fmt: skip


def find_two_precisions(question: Question) -> Iterator[Problem]:
    """Sections of two precisions that are both on."""
    on = [key for key in (*HALVES, "amp") if question.get(f"{key}.enabled") is True]
    if len(on) > 1:
        problem = f"{on[0]} and {on[1]} are both enabled; a model trains in one precision"
        yield error(on[0], problem, 'set "enabled": false in one of them')


def find_contradictions(question: Question) -> Iterator[Problem]:
    """Keys that lack another one, or that another one rules out."""
    if all(question.config.get(key) is None for key in BATCH_KEYS):
        yield error(BATCH_KEYS[0], "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu")
    for part in PARTS:
        if question.offload_device(part) == "nvme" and not question.get(f"{ZERO}.offload_{part}.nvme_path"):
            yield error(f"{ZERO}.offload_{part}", "NVMe has no nvme_path", "name a folder on the disk")
    if question.offload_device("optimizer") == "nvme" and question.stage in (1, 2):
        problem = "only stage 3 swaps optimizer states to NVMe"
        yield error(f"{ZERO}.offload_optimizer.device", problem, "take cpu, or stage 3")
    if question.get(f"{ZERO}.zero_quantized_weights") is True and question.get("torch_autocast.enabled") is True:
        yield error(f"{ZERO}.zero_quantized_weights", "torch_autocast rules it out", "leave one of them out")
    if question.zero.get("reduce_scatter") is not False and (key := _find_key_without_scatter(question)) is not None:
        problem = f"stage {question.stage} refuses {_WITHOUT_SCATTER[key]} with reduce_scatter, which is on"
        yield error(key, problem, f'write "reduce_scatter": false in "{ZERO}"')
    optimizer, schedule = question.get("optimizer.type"), question.get("scheduler.type")
    if not question.installed.has_optimizer:
        problem = f"neither DeepSpeed nor torch.optim has {optimizer!r}"
        yield error("optimizer.type", problem, 'write the name of one of theirs, such as "AdamW"')
    of_deepspeed = f"write the name of one of DeepSpeed's: {', '.join(question.installed.schedules)}"
    if schedule is not None and question.installed.schedule_arguments is None:
        yield error("scheduler.type", f"neither DeepSpeed nor torch has the schedule {schedule!r}", of_deepspeed)
    wraps = question.stage or enabled_half_precision(question.config)  # torch asks for an optimizer of its own
    if wraps and question.installed.schedule_arguments is not None and schedule not in question.installed.schedules:
        yield error("scheduler.type", "torch's schedules refuse the optimizer of ZeRO or half precision", of_deepspeed)
    lr, top = question.get("optimizer.params.lr"), question.get("scheduler.params.warmup_max_lr")
    if isinstance(lr, int | float) and isinstance(top, int | float) and lr != top:
        problem = f"the schedule goes to {top}, whatever optimizer.params.lr ({lr}) says"
        yield warning("scheduler.params.warmup_max_lr", problem, "give one value to both")
    warm, total = (question.get(f"scheduler.params.{name}") for name in ("warmup_num_steps", "total_num_steps"))
    if isinstance(warm, int) and isinstance(total, int) and warm >= total:
        problem = f"the warm-up ({warm}) is as long as the training ({total})"
        yield error("scheduler.params.warmup_num_steps", problem)


def _find_key_without_scatter(question: Question) -> str | None:
    """Return the key that DeepSpeed refuses at this stage unless reduce_scatter is off; None without one."""
    if question.stage == 3 and str(question.get("optimizer.type")).lower() == "muon":
        return "optimizer.type"
    if question.stage < 2 or str(question.config.get("gradient_allreduce_op")).lower() == "sum":
        return None
    if question.config.get("prescale_gradients") is True:
        return "prescale_gradients"
    factor = question.config.get("gradient_predivide_factor")
    return "gradient_predivide_factor" if is_number(factor) and factor != 1 else None


def find_ignored(question: Question) -> Iterator[Problem]:
    """Keys that have no effect because of another one."""
    stages, stage = read_known_keys().zero_optimization, question.stage
    for name in question.zero:
        if name in stages and stage not in stages[name] and not question.is_stage_open:
            obeying = ", ".join(str(each) for each in stages[name])
            yield note(f"{ZERO}.{name}", f"stage {stage} ignores it; it is for stage {obeying}", "leave it out")
    for part, least in (("param", 3), ("optimizer", 1)):
        if question.offload_device(part) != "none" and stage < least and not question.is_stage_open:
            hint = f"take stage {least}" + (" or more" if least < 3 else "")
            yield warning(f"{ZERO}.offload_{part}", f"stage {stage} has nothing to offload here", hint)
    fp16 = question.get("fp16")
    if isinstance(fp16, Mapping):
        if not fp16.get("enabled"):
            idle = [name for name in fp16 if name not in ("enabled", "auto_cast")]
            yield from _note_idle("fp16", idle, "fp16 is off")
            if fp16.get("auto_cast"):
                yield warning(
                    "fp16.auto_cast", "casts the model's inputs to fp16, although fp16 is off", "leave it out"
                )
        elif fp16.get("loss_scale") not in (None, 0, "auto"):
            adapting = [name for name in fp16 if name in _DYNAMIC_SCALE]
            problem = f"loss_scale {fp16['loss_scale']} is fixed"
            yield from _note_idle("fp16", adapting, problem, "give loss_scale 0 to adapt it")
    devices = {part: question.offload_device(part) for part in PARTS}
    for part, device in devices.items():
        section = question.get(f"{ZERO}.offload_{part}")
        if isinstance(section, Mapping) and device != "nvme":
            swapping = [name for name in section if name in _ONLY_NVME]
            yield from _note_idle(f"{ZERO}.offload_{part}", swapping, f"the device is {device}, not NVMe")
    if "aio" in question.config and "nvme" not in devices.values():
        yield note("aio", "nothing is offloaded to NVMe, so it has no effect")


def _note_idle(section: str, names: Sequence[str], reason: str, hint: str = "") -> Iterator[Problem]:
    """One note on keys of a section that have no effect for the same reason."""
    if names:
        have = "they have" if len(names) > 1 else "it has"
        yield note(f"{section}.{name_first(names)}", f"{reason}, so {have} no effect", hint)


def find_auto(question: Question) -> Iterator[Problem]:
    """Each "auto" that the Hugging Face Trainer or accelerate has to fill in; one note on all of them."""
    defaults = question.installed.defaults
    names = [name for name, value in walk_keys(question.config) if value == "auto" and defaults.get(name) != "auto"]
    if names:
        problem = '"auto" is filled in by the Hugging Face Trainer and accelerate only'
        yield note(name_first(names), problem, "elsewhere give a value (memory is simulated with DeepSpeed's own)")


def find_sizes_that_hurt(question: Question) -> Iterator[Problem]:
    """Buckets that are too small or too large."""
    stages, stage = read_known_keys().zero_optimization, question.stage
    # allgather_bucket_size has no effect: deepspeed/runtime/utils.py:all_gather_dp_groups gathers a group at once.
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
        size = question.zero.get(name)
        if not is_number(size) or stage not in stages[name]:
            continue
        problem = None
        if 0 < size < _SMALL_BUCKET:
            problem = f"{size:,.0f} elements make many small messages, whose latency decides"
        elif size > _LARGE_BUCKET:
            problem = f"a buffer of {size:,.0f} elements is more than most GPUs can spare"
        if problem is not None:
            yield warning(f"{ZERO}.{name}", problem, "1e7 to 5e8 are usual")
    name = "stage3_param_persistence_threshold"
    if stage == 3 and question.zero.get(name) == 0:
        problem = "even biases and norms are collected for each use, in many tiny messages"
        yield warning(f"{ZERO}.{name}", problem, "1e4 to 1e6 are usual")


def find_harmful(question: Question) -> Iterator[Problem]:
    """Switches that DeepSpeed takes, and that hurt speed or memory."""
    stage = question.stage
    for part in PARTS:
        name = f"{ZERO}.offload_{part}.pin_memory"
        if question.offload_device(part) != "none" and question.get(name) is False:
            problem = "copies from unpinned memory are slower, and wait for each other"
            yield warning(name, problem, "true, if host memory allows it")
    if stage and question.zero.get("contiguous_gradients") is False:
        problem = "gradients of all sizes stay where they appear, which fragments the device's memory"
        yield warning(f"{ZERO}.contiguous_gradients", problem, "leave it true")
    if stage and question.zero.get("reduce_scatter") is False and _find_key_without_scatter(question) is None:
        problem = "each GPU receives all averaged gradients, about twice the bytes"
        yield warning(f"{ZERO}.reduce_scatter", problem, "leave it true")
    for name, problem in _SLOW_SWITCHES.items():
        if question.get(name) is True:
            yield warning(name, problem, "turn it off for real training")
    if isinstance(logger := question.config.get("comms_logger"), Mapping):
        # DeepSpeed asks for the section alone (comm/config.py), and obeys no "enabled" in it.
        is_on = "" if logger.get("enabled") is True else "DeepSpeed turns it on wherever this section is, and "
        problem, hint = f"{is_on}it waits for the GPU after each collective", "leave the section out for real training"
        yield warning("comms_logger.enabled" if "enabled" in logger else "comms_logger", problem, hint)
    halves = [question.get(f"{name}.enabled") for name in (*HALVES, "torch_autocast")]
    is_fp32 = enabled_half_precision(question.config) is None and True not in halves and "auto" not in halves
    if is_fp32 and not question.on_cpu:  # a processor without AVX-512 multiplies bf16 more slowly
        problem = "no half precision is enabled: in fp32 activations take twice the memory, and GPUs are slower"
        hint = 'give "bf16": {"enabled": true}; in a file of accelerate\'s, mixed_precision: bf16'
        yield warning("bf16", problem, hint)
    if stage == 0 and ZERO in question.config and not question.is_stage_open:
        yield note(f"{ZERO}.stage", "stage 0 is plain data parallelism: every GPU holds all states")
    if stage == 3 and not decides_gathering(question.config):
        problem = "no whole weights are saved: accelerate raises at the save, and the Trainer writes shards"
        yield note(f"{ZERO}.{GATHER}", problem, "true, if rank 0's host holds the whole model")
    clips_at = question.installed.defaults.get("gradient_clipping")
    if "gradient_clipping" not in question.config and clips_at:
        problem = f"it is not given, and this DeepSpeed clips at {clips_at} then"
        yield note("gradient_clipping", problem, "0 turns clipping off")


def find_unchosen(question: Question) -> Iterator[Problem]:
    """Features that are not for the ladder, so that no fit compares rungs with and without them."""
    for row, reason in read_known_keys().unchosen.items():
        key, _, wanted = row.partition("=")
        value = question.get(key)
        if value and wanted in str(value).lower():
            yield note(key, f"no fit chooses it: {reason}", "try it by hand against the config that a fit finds")


def find_release_faults(question: Question) -> Iterator[Problem]:
    """What the installed release does wrong, or slowly, at this stage, and no error shows."""
    for fault in find_faults(question.installed.version):
        if fault.concerns(question.stage, precision_name(question.config), question.config):
            severity: Severity = "error" if fault.effect == "wrong" else "warning"
            text = fault.describe(question.installed.version)
            yield Problem(severity=severity, key=fault.key, problem=text, hint=fault.remedy)
