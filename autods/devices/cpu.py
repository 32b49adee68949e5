"""CPU ranks with a memory budget, which stand in for GPUs: for tests, and for a first look without a card."""

from __future__ import annotations

from .base import Device

CPU = Device(
    name="cpu",
    backend="gloo",
    has_cards=False,
    ray_resource="CPU",
    shares_host_memory=True,
    has_caching_allocator=False,
    constants="cpu",
    meter="autods.rank.memory:CpuMeter",
    stands_in=True,
    survives_fork=True,
    # It takes gloo's place within a node. It would take 20 s to build, and leaves files in shared memory.
    omitted_ops=("deepspeed_shm_comm",),
    variables={
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # Without these a memory budget is used up by per-thread arenas and by freed memory that malloc keeps.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    },
    idle_variables=("NCCL_", "CUDA_", "PYTORCH_NO_CUDA_"),
    launch_variables={"DS_ACCELERATOR": "cpu"},
    cache_folders=(".cache",),
)
