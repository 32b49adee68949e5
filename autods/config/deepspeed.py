"""Compose DeepSpeed configs from a rung, the user's base config and the knobs of a trial."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..schema import read_toml_as
from ..system.host import data_folder
from ..types import Knobs, ModelFacts, Scalar, WorkloadForm, WorkloadSource
from .catalogue import Site
from .rungs import Rung, fill_in

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
HALVES = ("fp16", "bf16")
GATHER = "stage3_gather_16bit_weights_on_model_save"
PINS = tuple(f"zero_optimization.offload_{part}.pin_memory" for part in ("param", "optimizer"))
_USUAL_BUFFER = 100_000_000  # elements, of DeepSpeed's offload_param.buffer_size
# The rung sets these keys; values of the base config are replaced. The last three are old names of offloads.
_RUNG_KEYS = (
    "stage", "offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "cpu_offload_params",
)  # fmt: skip
DEFAULT_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}}
_FUSED_ADAM = {"torch_adam": True, "fused": True}
# Sections that log to the user's dashboards or profile a step; trials leave them out.
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")
# The ops of DeepSpeed's own optimizers (`DeepSpeedEngine._configure_basic_optimizer`): on the device, and on the host
# where their states are offloaded. None: torch's own class. Muon falls back to torch where the device has no op.
_OPTIMIZER_OPS = {
    "adam": ("fused_adam", "cpu_adam"),
    "adamw": ("fused_adam", "cpu_adam"),
    "muon": (None, "cpu_adam"),
    "lion": ("fused_lion", "cpu_lion"),
    "adagrad": (None, "cpu_adagrad"),
    "lamb": ("fused_lamb", "fused_lamb"),
}
# Those that DeepSpeed has tested ZeRO with (runtime/zero/utils.py); it refuses others unless a switch allows them.
_TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
# Switches of ZeRO++ that load DeepSpeed's quantizer (partition_parameters.py, coalesced_collectives.py).
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The keys of a DeepSpeed config, as `configs/deepspeed/keys.toml` lists them."""

    scalars: tuple[str, ...]
    sections: tuple[str, ...]
    others: tuple[str, ...]
    other_values: tuple[str, ...]
    inside: Mapping[str, tuple[str, ...]]
    zero_optimization: Mapping[str, tuple[int, ...]]
    offload: Mapping[str, tuple[str, ...]]
    instead: Mapping[str, str]
    removed: Mapping[str, str]
    removed_varied: tuple[str, ...]
    deprecated: Mapping[str, str]
    unchosen: Mapping[str, str]

    @property
    def tables(self) -> tuple[str, ...]:
        """The keys at the top whose value is an object."""
        return (*self.sections, *self.others, "zero_optimization")

    @property
    def top(self) -> tuple[str, ...]:
        """All keys at the top."""
        return (*BATCH_KEYS, *self.tables, *self.scalars, *self.other_values, *self.removed)


@cache
def read_known_keys() -> KnownKeys:
    path = data_folder("configs") / "deepspeed" / "keys.toml"
    return read_toml_as(KnownKeys, path, name="list of keys")


def leave_out_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without what is "auto", as DeepSpeed alone could read it.

    Two sections go as a whole: a half precision that may be on, and a scheduler with an open argument, for it needs
    each of its arguments.
    """

    def leave_out_of(section: Mapping[str, Any]) -> dict[str, Any]:
        kept = ((key, value) for key, value in section.items() if value != "auto")
        return {key: leave_out_of(value) if isinstance(value, Mapping) else value for key, value in kept}

    schedule = config.get("scheduler")
    wholes = {half for half in HALVES if get_key(config, f"{half}.enabled") == "auto"}
    if isinstance(schedule, Mapping) and leave_out_of(schedule) != schedule:
        wholes.add("scheduler")
    return leave_out_of({key: value for key, value in config.items() if key not in wholes})


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dict in which `over` wins; nested dicts are merged."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


def get_key(config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a dotted key such as 'zero_optimization.stage'; None where there is none."""
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def use_documented_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with bf16 and ZeRO's keys as DeepSpeed documents them, without those of ZeRO that are "auto".

    It reads max_live_parameters, say, for stage3_max_live_parameters, and refuses both together.
    """
    renamed = {"bf16" if name == "bfloat16" and "bf16" not in config else name: config[name] for name in config}
    zero = renamed.get("zero_optimization")
    if isinstance(zero, Mapping):
        renamed["zero_optimization"] = {documented_name(name): zero[name] for name in zero if zero[name] != "auto"}
    return renamed


def documented_name(name: str) -> str:
    """'max_live_parameters' → 'stage3_max_live_parameters'; other names of ZeRO's keys stay."""
    return f"stage3_{name}" if f"stage3_{name}" in read_known_keys().zero_optimization else name


def allow_gathering(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with whole weights gathered at stage 3 when a model is saved, unless it says otherwise.

    Without it DeepSpeed and the Trainer save no model there, and accelerate raises, after all the training.
    """
    return dict(config) if decides_gathering(config) else merge(config, {"zero_optimization": {GATHER: True}})


def decides_gathering(config: Mapping[str, Any]) -> bool:
    """Whether the config says, under any name of the key, that whole weights are gathered or not."""
    zero = get_key(config, "zero_optimization") or {}
    return not {GATHER, "stage3_gather_fp16_weights_on_model_save"}.isdisjoint(map(documented_name, zero))


def enabled_half_precision(config: Mapping[str, Any]) -> str | None:
    """Return 'bf16' or 'fp16', whichever is enabled; None: fp32. DeepSpeed reads bf16's old name, too."""
    if get_key(config, "bf16.enabled") or ("bf16" not in config and get_key(config, "bfloat16.enabled")):
        return "bf16"
    return "fp16" if get_key(config, "fp16.enabled") else None


def precision_name(config: Mapping[str, Any]) -> str:
    """Return the precision of a config: 'bf16', 'fp16' or 'fp32'."""
    return enabled_half_precision(config) or "fp32"


def uses_autocast(config: Mapping[str, Any]) -> bool:
    """Whether torch's autocast computes in half precision with weights in fp32."""
    return get_key(config, "torch_autocast.enabled") is True


def names_precision(config: Mapping[str, Any]) -> bool:
    """Whether the config says in which precision it trains, also where it turns one off."""
    return not config.keys().isdisjoint(HALVES) or uses_autocast(config)


def leave_out(config: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    """Return the config without a key that it has, which is named by its place ("zero_optimization.stage")."""
    first, _, rest = dotted.partition(".")
    kept = {key: value for key, value in config.items() if key != first}
    return {**kept, first: leave_out(config[first], rest)} if rest else kept


def nest_key(dotted: str, value: Any) -> dict[str, Any]:
    """'a.b', 1 → {'a': {'b': 1}}."""
    head, _, tail = dotted.partition(".")
    return {head: nest_key(tail, value) if tail else value}


def start_settings(
    rung: Rung, *, base: Mapping[str, Any], device_bytes: int, facts: ModelFacts, as_written: bool = False
) -> dict[str, Scalar]:
    """Return the first values of the keys that the rung starts with.

    A smaller number of the user's base config wins, and so does any value of a switch.

    With `as_written` only those keys are sized that the base config lacks and without which the rung does not start.
    """
    start: dict[str, Scalar] = {}
    for key, sizing in rung.start.items():
        users = get_key(base, key)
        if as_written and (users is not None or not sizing.is_required(facts)):
            continue
        if sizing.switch is not None:
            start[key] = users if isinstance(users, bool) else sizing.switch
            continue
        value = sizing.size(device_bytes=device_bytes, facts=facts)
        is_number = isinstance(users, (int, float)) and not isinstance(users, bool)
        start[key] = min(value, int(users)) if is_number and sizing.device_share is not None else value
    return start


def compose(rung: Rung, knobs: Knobs, site: Site, facts: ModelFacts | None) -> dict[str, Any]:
    """Return the whole DeepSpeed config of a rung at a site, usable by plain `deepspeed.initialize`.

    A workload that passes an optimizer object gets a config that names none. The facts are None before they are known.
    """
    replicas = count_replicas(site.base, site.world_size, facts)
    own_optimizer = facts is not None and facts.has_optimizer
    config = merge(strip_rung_keys(site.base), fill_in(rung, site, _count_largest_part(site, facts, replicas)))
    if "aio" in site.base:
        config = merge(config, {"aio": site.base["aio"]})  # what its user knows of the disk wins over the rung's
    for key, value in knobs.settings.items():
        config = merge(config, nest_key(key, value))
    config = merge(config, _optimizer(config, rung, own_optimizer))
    if own_optimizer:
        config.pop("optimizer", None)
    sizes = dict(zip(BATCH_KEYS, (knobs.train_batch(replicas), knobs.micro_batch, knobs.accumulation), strict=True))
    if count_sharers(config, TENSOR_RANKS) > 1:
        # DeepSpeed 0.19.8 counts each of these ranks, but one of a group where stage 3 splits the parameters
        # (zero.Init reads the config with an mpu): it multiplies itself, and no total goes with both.
        del sizes["train_batch_size"]
    return config | sizes


def _count_largest_part(site: Site, facts: ModelFacts | None, replicas: int) -> int:
    """Return the elements of a rank's part of the largest parameter, and 5 % more; DeepSpeed's default without facts.

    DeepSpeed reads and writes parts alone on NVMe (`AsyncPartitionedParameterSwapper`), of as many ranks as split a
    parameter: the replicas at least, but with MiCS those of a group. Experts may have groups of their own.
    """
    if facts is None:
        return _USUAL_BUFFER
    group = get_key(site.base, "zero_optimization.mics_shard_size")
    ranks = min(replicas, group) if isinstance(group, int) and group > 0 else replicas
    ranks = 1 if "expert_parallel" in site.base else ranks
    return 2 * math.ceil(facts.largest_parameter / ranks * 1.05 / 2)


SEQUENCE_RANKS, TENSOR_RANKS = "sequence_parallel_size", "tensor_parallel.autotp_size"


def count_sharers(config: Mapping[str, Any], *keys: str) -> int:
    """Return how many neighbouring ranks train on the same samples by these keys; without keys, by all that do so."""
    return math.prod(read_ranks(get_key(config, key)) for key in keys or (SEQUENCE_RANKS, TENSOR_RANKS))


def read_ranks(size: Any) -> int:
    """Return the ranks of a group as DeepSpeed's models read it, text too; 1 where it is none."""
    try:
        number = float(size)
    except (TypeError, ValueError):
        return 1
    return max(1, int(number)) if math.isfinite(number) else 1


def count_sequence_sharers(source: WorkloadSource, config: Mapping[str, Any]) -> int:
    """Return how many ranks share each sequence of a model's config; 1 for code, which sets that up by itself."""
    return count_sharers(config, SEQUENCE_RANKS) if source.form.is_model_config else 1


def count_replicas(config: Mapping[str, Any], world_size: int, facts: ModelFacts | None = None) -> int:
    """Return the data-parallel size, by which a step's samples are micro batch × accumulation.

    It is the number of a pipeline's replicas. Otherwise the ranks that share a sequence (Ulysses, ALST) or split the
    layers (AutoTP) count as one. The facts are None before they are known.
    """
    if facts is not None and facts.replica_ranks > 1:
        return world_size // facts.replica_ranks
    return world_size // count_sharers(config)


# A step's micro batches where nobody says how many. Memory is that of any longer accumulation: from the second on,
# each runs with kept gradients. With one alone ZeRO-1 would hide the whole gradients that it keeps.
ENOUGH_ACCUMULATION = 2


def says_accumulation(site: Site) -> bool:
    """Whether the user decides how many micro batches a step has, by its global batch or the config."""
    return site.global_batch is not None or isinstance(site.base.get(BATCH_KEYS[2]), int)


def choose_accumulation(site: Site, micro_batch: int, form: WorkloadForm) -> int:
    """Return the micro batches of a step of a forecast at a site. Raises ValueError as `accumulation_for` does."""
    replicas = count_replicas(site.base, site.world_size)
    return accumulation_for(site.global_batch, micro_batch, replicas, default_accumulation(site.base, form))


def default_accumulation(base: Mapping[str, Any], form: WorkloadForm) -> int:
    """Return the micro batches of a step without a global batch: those of the config, else enough to show any more.

    A script that names none has one: it decides that by itself, and need not have an argument for it.
    """
    users = base.get(BATCH_KEYS[2])
    return users if isinstance(users, int) else 1 if form.runs_as_main else ENOUGH_ACCUMULATION


def accumulation_for(global_batch: int | None, micro_batch: int, world_size: int, default: int = 1) -> int:
    """Return the micro batches of an optimizer step, by DeepSpeed's identity; `default` without a global batch.

    It is micro batch × accumulation × world size = global batch. Raises ValueError when no whole number does it:
    callers take micro batches from `micro_batches` only.
    """
    if global_batch is None:
        return default
    accumulation, rest = divmod(global_batch, micro_batch * world_size)
    if rest or not accumulation:
        raise ValueError(f"a global batch of {global_batch} is no multiple of {micro_batch} × {world_size} ranks")
    return accumulation


@cache
def micro_batches(global_batch: int | None, world_size: int, most: int) -> range | tuple[int, ...]:
    """Return the micro batches that may be tried, ascending: all up to `most`, or those that divide a rank's share."""
    if global_batch is None:
        return range(1, most + 1)
    share = global_batch // world_size
    return tuple(size for size in range(1, min(share, most) + 1) if share % size == 0)


def check_micro_batch(micro_batch: int, replicas: int, global_batch: int | None, *, is_fixed: bool = False) -> None:
    """Raise InputError where the micro batch, the script's own if it `is_fixed`, does not divide the global one."""
    of_all = micro_batch * replicas
    if global_batch is None or global_batch % of_all == 0:
        return
    subject = "the script's own micro batch" if is_fixed else "micro batch"
    smaller = "" if is_fixed else f", or a --micro-batch that divides {global_batch // replicas}"
    raise InputError(
        f"{subject} {micro_batch} × {replicas} ranks does not divide the global batch {global_batch}",
        hint=f"give --global-batch {math.ceil(global_batch / of_all) * of_all}{smaller}",
    )


def strip_rung_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the keys that the rung and the batch set."""
    named = use_documented_names(config)
    zero = {key: value for key, value in dict(named.get("zero_optimization") or {}).items() if key not in _RUNG_KEYS}
    return {key: value for key, value in named.items() if key not in BATCH_KEYS} | {"zero_optimization": zero}


def without_monitors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for a trial: without monitors, whose packages may be missing here, and without the profiler."""
    return {key: value for key, value in config.items() if key not in _MONITORS}


def place_monitors(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a run whose monitors write below the folder: a `model.py` trains in one that is removed."""
    placed = dict(config)
    for name in _MONITORS:
        section = config.get(name)
        if isinstance(section, Mapping) and isinstance(section.get("output_path"), str):
            placed[name] = {**section, "output_path": str(folder / section["output_path"])}
    return placed


def find_offloads(config: Mapping[str, Any]) -> dict[str, str]:
    """Return where ZeRO's states lie that are not on the device: 'optimizer' and 'param' → 'cpu' or 'nvme'."""
    named = {part: get_key(config, f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")}
    return {part: device for part, device in named.items() if device in ("cpu", "nvme")}


def required_ops(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the DeepSpeed ops that the engine loads with this config; ops that are not cached are built first."""
    offloads, ops = find_offloads(config), []
    on_device, on_host = _OPTIMIZER_OPS.get(str(get_key(config, "optimizer.type")).lower(), (None, None))
    op = on_host if "optimizer" in offloads else on_device
    if op is not None and not get_key(config, "optimizer.params.torch_adam"):
        ops.append(op)
    if "nvme" in offloads.values():
        ops.append("async_io")
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") == 3 and any(zero.get(key) is True for key in _QUANTIZED):  # no other stage quantizes
        ops.append("quantizer")
    return tuple(ops)


def find_broken_op(config: Mapping[str, Any], problems: Mapping[str, str]) -> str | None:
    """Return why an op of this config does not work; None where all do. `problems` maps an op to the reason."""
    for op in required_ops(config):
        if op in problems:
            return problems[op] if op in problems[op] else f"its op {op} cannot be built: {problems[op]}"
    return None


def is_default_optimizer(optimizer: Any) -> bool:
    """Whether this section of a config is the optimizer that a config without any gets."""
    if not isinstance(optimizer, Mapping):
        return False
    params = {key: value for key, value in dict(optimizer.get("params") or {}).items() if key not in _FUSED_ADAM}
    return {**optimizer, "params": params} == DEFAULT_OPTIMIZER


def _optimizer(config: Mapping[str, Any], rung: Rung, own_optimizer: bool) -> dict[str, Any]:
    """The optimizer section, and the switches that go with it.

    A config without an optimizer gets AdamW: DeepSpeed's CPU Adam where its states are offloaded, and torch's fused
    one where they stay on the device. That one needs no op to be built, and no temporary of 4 bytes an element as
    torch's default does. DeepSpeed's FusedAdam is as fast, but takes a compiler, and makes stage 0 flatten all states.
    """
    offloaded = rung.places["optimizer"] != "device"
    named = {key: value for key, value in (config.get("optimizer") or {}).items() if value is not None}
    if not own_optimizer and not named.get("type"):
        default = merge(DEFAULT_OPTIMIZER, named)
        return {"optimizer": default if offloaded else merge(default, {"params": _FUSED_ADAM})}
    added: dict[str, Any] = {}
    if own_optimizer and offloaded:
        added["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed insists on its own CPU Adam otherwise
    is_tested = not own_optimizer and str(named["type"]).lower() in _TESTED_WITH_ZERO
    if rung.stage and not is_tested and "zero_allow_untested_optimizer" not in config:
        added["zero_allow_untested_optimizer"] = True  # the user chose it: SGD, say, works, and is refused otherwise
    return added


# Where the Trainer compares the config with its arguments, and fills in "auto" (transformers 5.23, fill_match in
# integrations/deepspeed.py). total_num_steps has no argument: it computes it. warmup_min_lr, which "auto" would make 0,
# and some keys of zero_optimization are filled in, too, but never compared: the user's values stay.
_FILLED_IN = (
    *BATCH_KEYS, "gradient_clipping", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.weight_decay", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled",
)  # fmt: skip


def to_trainer_config(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with "auto" wherever the Trainer compares a key with its arguments.

    train_batch_size is left out: DeepSpeed multiplies, and accelerate counts CPU ranks as one process.
    """
    config = {key: value for key, value in ds_config.items() if key != "train_batch_size"}
    for key in _FILLED_IN:
        if get_key(config, key) is not None:
            config = merge(config, nest_key(key, "auto"))
    return config


def to_lightning_config(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without batch size and accumulation, which Lightning's strategy refuses to find there."""
    return {key: value for key, value in ds_config.items() if key not in BATCH_KEYS[::2]}
