"""What the HF Trainer and accelerate need besides the config. Values in, values out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..ds_config import DEFAULT_OPTIMIZER, get, half_precision
from .result import Report

_ARGUMENTS = {
    "gradient_clipping": "--max_grad_norm",
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.eps": "--adam_epsilon",
    "optimizer.params.weight_decay": "--weight_decay",
    "scheduler.params.warmup_num_steps": "--warmup_steps",
}


def trainer_arguments(report: Report, config: str) -> tuple[str, ...]:
    """The `TrainingArguments` that go with the config at the path `config`, as a command line has them."""
    assert report.knobs is not None
    assert report.ds_config is not None
    half = half_precision(report.ds_config)
    return (
        "--deepspeed", config,
        "--per_device_train_batch_size", str(report.knobs.micro_batch),
        "--gradient_accumulation_steps", str(report.knobs.accumulation),
        *((f"--{half}",) if half else ()),
        *(("--gradient_checkpointing",) if report.knobs.checkpointing else ()),
        *(("--use_cpu",) if report.question.get("device") == "cpu" else ()),
        *_users_own(report.ds_config),
    )  # fmt: skip


def accelerate_yaml(report: Report, config: str) -> str:
    """For `accelerate launch --config_file`, over the config at the path `config`.

    Beside a deepspeed_config_file accelerate refuses what that file says already (`DeepSpeedPlugin.
    _deepspeed_config_checks`): stage, offload, accumulation, clipping, precision.
    """
    asked = report.question
    said = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": config},
        "num_machines": int(asked.get("nodes", 1)),
        "machine_rank": 0,
        "num_processes": int(asked.get("gpus", 1)),
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": asked.get("device") == "cpu",
    }
    return "\n".join((*_notes(report.ds_config or {}), *_yaml(said))) + "\n"


def _notes(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """What accelerate asks of a script, said where it is read."""
    micro_batch = ds_config.get("train_micro_batch_size_per_gpu")
    yield f"# The dataloader's batch_size is the config's micro batch: {micro_batch}"
    for section, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
        if section in ds_config:
            yield f"# The config has the {section}: give accelerator.prepare an accelerate.utils.{dummy}"


def _users_own(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """What the config says of training itself; our own default of an optimizer says nothing."""
    params = get(ds_config, "optimizer.params") or {}
    ours = {key: value for key, value in params.items() if key != "torch_adam"} == DEFAULT_OPTIMIZER["params"]
    for key, argument in _ARGUMENTS.items():
        value = get(ds_config, key)
        if value not in (None, "auto") and not (ours and key.startswith("optimizer.")):
            yield from (argument, str(value))
    betas = params.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2 and not ours:
        yield from ("--adam_beta1", str(betas[0]), "--adam_beta2", str(betas[1]))


def _yaml(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Maps of plain values; a JSON string is a YAML string."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            bare = isinstance(value, str) and value.replace("_", "").isalpha()
            yield f"{indent}{key}: {value if bare else json.dumps(value)}"
