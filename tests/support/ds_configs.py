"""DeepSpeed configs as people publish them: a pre-training, a guide to ZeRO-3 with offload, and one for the Trainer."""

from __future__ import annotations

from typing import Any

PRETRAINING: dict[str, Any] = {
    "train_batch_size": 144,
    "train_micro_batch_size_per_gpu": 24,
    "gradient_accumulation_steps": 6,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-7, "weight_decay": 1e-2}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": 37256,
            "warmup_min_ratio": 0.0,
            "warmup_num_steps": 1000,
            "cos_min_ratio": 0.0001,
            "warmup_type": "linear",
        },
    },
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": 500000000,
        "allgather_bucket_size": 500000000,
    },
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "dump_state": False,
    "wandb": {"enabled": True, "team": "pretraining", "project": "DS_Pre", "group": "2GPUs"},
}
GUIDE: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 1e7,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 1e7,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": False},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 100},
    "gradient_clipping": 0.5,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
}
TRAINER: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
