"""The kinds of training scripts: the libraries that call DeepSpeed for them. A further one is a row and an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..types import WorkloadSource

# The files of a fit's config.
DS_CONFIG = "ds_config.json"
DS_CONFIG_HF = "ds_config_hf.json"  # with "auto" for the keys that the HF Trainer fills in
DS_CONFIG_LIGHTNING = "ds_config_lightning.json"  # without the accumulation steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptKind:
    """A library that calls DeepSpeed for a script. Its adapter is the module of this name in `rank/script/adapters`.

    A script is of the first kind in whose `packages` it imports a name that `names` matches; without any, of the first
    whose `last_names` does. `preloaded` are modules that the adapter imports before the script begins. `config_readers`
    are those that read a DeepSpeed config, where not all of its packages do.
    `fills_in_auto`: the library replaces "auto" in a DeepSpeed config. `takes_local_rank`: its parser knows the option
    of the `deepspeed` launcher. `sets_sizes`: trials set the sizes in its arguments. `sets` are keys of a config that
    the library sets by arguments of its own, where the config has none.

    The others tell how a user starts the script. `config_file` is the file of its config, `config_place` the place for
    that in the code; None where its launcher gives it the config. `timeout_place` is the code for the timeout of its
    process groups, where the library sets one itself. `by_accelerate`: `accelerate launch` starts it too.
    `note_on_cpu` is how the library treats CPU ranks outside of a trial. `way_to_engine` is the hint for a script that
    ends, or trains, without an engine.
    """

    name: str
    description: str
    packages: tuple[str, ...]
    names: str
    last_names: str = "(?!)"  # nothing
    preloaded: tuple[str, ...] = ()
    config_readers: tuple[str, ...] = ()
    fills_in_auto: bool = False
    takes_local_rank: bool = False
    sets_sizes: bool = False
    sets: tuple[str, ...] = ()
    config_file: str = DS_CONFIG
    config_place: str | None = None
    timeout_place: str | None = None
    by_accelerate: bool = False
    note_on_cpu: str | None = None
    way_to_engine: str = (
        "is an argument missing after --? A script without DeepSpeed needs engine, *_ = "
        "deepspeed.initialize(model=model, optimizer=optimizer, config=…), then engine.backward(loss) and engine.step()"
    )


_ROWS = (
    ScriptKind(
        name="deepspeed",
        description="a DeepSpeed script: it calls deepspeed.initialize",
        packages=("deepspeed",),
        names="initialize",
        last_names=".*",
        config_place="deepspeed.initialize(…, config",
    ),
    ScriptKind(
        name="lightning",
        description="a Lightning script",
        packages=("lightning", "pytorch_lightning", "lightning_fabric"),
        names=".*",
        preloaded=("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"),
        sets=("gradient_clipping",),
        config_file=DS_CONFIG_LIGHTNING,
        config_place="DeepSpeedStrategy(config",
        timeout_place="DeepSpeedStrategy(…, timeout=datetime.timedelta(minutes={minutes}))",
        note_on_cpu="on GPUs: Lightning's DeepSpeedStrategy takes no CPU ranks",
        way_to_engine='give its Trainer or Fabric strategy="deepspeed_stage_2", or a DeepSpeedStrategy(…)',
    ),
    ScriptKind(
        name="hf_trainer",
        description="a script of Hugging Face's Trainer",
        packages=("transformers", "trl", "sentence_transformers", "setfit"),
        names="TrainingArguments|HfArgumentParser|.*Trainer",
        preloaded=("transformers.trainer",),
        config_readers=("transformers.trainer", "transformers.training_args", "transformers.integrations"),
        fills_in_auto=True,
        takes_local_rank=True,
        sets_sizes=True,
        config_file=DS_CONFIG_HF,
        config_place="TrainingArguments(…, deepspeed",
        by_accelerate=True,
    ),
    ScriptKind(
        name="accelerate",
        description="a script of Hugging Face's accelerate",
        packages=("accelerate",),
        names=".*",
        preloaded=("accelerate",),
        fills_in_auto=True,
        by_accelerate=True,
        way_to_engine="its Accelerator has to make the engine, in prepare(model, optimizer, …): cpu=True, or --cpu "
        "after --, leaves DeepSpeed out; autods --device cpu needs neither",
        note_on_cpu="on CPU ranks accelerate does not share out the data: each rank trains on all of it; "
        "on GPUs it does",
    ),
)
SCRIPT_KINDS: Mapping[str, ScriptKind] = {row.name: row for row in _ROWS}


def find_library(source: WorkloadSource) -> ScriptKind | None:
    """The library that calls DeepSpeed for a script; None where its imports do not show it, and for other workloads."""
    return None if source.script_kind is None else SCRIPT_KINDS[source.script_kind]


def presume_library(source: WorkloadSource) -> ScriptKind:
    """The library that calls DeepSpeed for a script; DeepSpeed itself where its imports do not show one."""
    return find_library(source) or SCRIPT_KINDS["deepspeed"]
