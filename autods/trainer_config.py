"""The DeepSpeed config as trainers want it that know some of it themselves: the Hugging Face Trainer, Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ds_config import BATCH_KEYS, get, merge, nested

# Where the Trainer compares the config with its arguments, and fills in "auto" (transformers 5.23, fill_match in
# integrations/deepspeed.py). warmup_min_lr and total_num_steps have no argument: it computes them.
FILLED_IN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "fp16.enabled",
    "bf16.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)

_ALSO_OURS = "zero_optimization."  # filled in where it says "auto", and never compared with an argument


def for_trainer(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with "auto" exactly where the Trainer would compare, so that nothing can contradict its arguments.

    train_batch_size is left out: DeepSpeed multiplies, and accelerate counts CPU ranks as one process.
    """
    config = {key: value for key, value in ds_config.items() if key != "train_batch_size"}
    for key in FILLED_IN:
        if get(config, key) is not None and not key.startswith(_ALSO_OURS):
            config = merge(config, nested(key, "auto"))
    return config


def for_lightning(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Without accumulation steps: the strategy takes them from `accumulate_grad_batches`, and refuses the key."""
    return {key: value for key, value in ds_config.items() if key not in BATCH_KEYS[::2]}
