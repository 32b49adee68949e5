"""A plain DeepSpeed training loop for a config that autods found; it knows nothing of autods.

deepspeed --num_gpus 2 examples/train.py --deepspeed_config autods-out/demo/ds_config.json
torchrun --nproc_per_node 2 examples/train.py --deepspeed_config autods-out/demo/ds_config.json --memory-budget 416MiB

The second line trains on CPU ranks where there is no GPU, each with a hard memory budget, like the trials of a fit.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import pathlib
import random
import re
import resource
import sys

# How the ranks of a trial run: one thread, freed memory goes back at once. malloc reads these when a process begins.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

# Imported at the first step otherwise. Code would not lie in a card's memory, so the budget leaves it out.
IMPORTED_LATE = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
    "transformers.integrations.deepspeed",
)


def main() -> None:
    asked = arguments()
    if asked.memory_budget and any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    deepspeed = import_deepspeed()
    import torch

    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(torch.distributed.get_rank())
    random.seed(torch.distributed.get_rank())
    workload = load(asked.model)
    if asked.memory_budget:
        limit_memory(asked.memory_budget)
    model = workload.build_model()
    if asked.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=str(asked.deepspeed_config)
    )
    losses = [train_step(engine, workload.build_batch) for _ in range(asked.steps)]
    if torch.distributed.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps", flush=True)
    if asked.memory_budget:
        limit_memory(None)  # training is over; taking gloo down starts threads
    torch.distributed.barrier()  # a rank that leaves early takes the others' connections with it
    torch.distributed.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path(__file__).with_name("gpt.py"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--memory-budget", type=size, help="of each CPU rank, such as 416MiB")
    parser.add_argument("--local_rank", type=int, help="the deepspeed launcher passes it; LOCAL_RANK says the same")
    return parser.parse_args()


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG])iB", text)
    if found is None:
        raise argparse.ArgumentTypeError("give a size such as 416MiB")
    return int(found[1]) << {"K": 10, "M": 20, "G": 30}[found[2]]


def import_deepspeed():
    """On CPU ranks where there is no GPU; without the op that DeepSpeed would compile for them in the first run."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        for name in IMPORTED_LATE:
            with contextlib.suppress(ImportError):  # another version may lack it
                importlib.import_module(name)
    return deepspeed


def load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location("workload", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_memory(budget_bytes: int | None) -> None:
    """From here on this process may add that much private memory, and no byte more. None: as much as it likes."""
    status = pathlib.Path("/proc/self/status").read_text()
    used_bytes = int(re.search(r"VmData:\s*(\d+) kB", status)[1]) * 1024
    most = resource.RLIM_INFINITY if budget_bytes is None else used_bytes + budget_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def train_step(engine, build_batch) -> float:
    """One optimizer step; the mean loss of its micro batches."""
    total = 0.0
    for _ in range(engine.gradient_accumulation_steps()):
        batch = build_batch(engine.train_micro_batch_size_per_gpu())
        out = engine(**{name: placed(tensor, engine) for name, tensor in batch.items()})
        loss = getattr(out, "loss", out)
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    mean = total / engine.gradient_accumulation_steps()
    if engine.global_rank == 0:
        print(f"step {engine.global_steps}: loss {mean:.3f}", flush=True)
    return mean


def placed(tensor, engine):
    """On the engine's device; numbers with a fraction in the precision that the config says."""
    dtype = next(engine.module.parameters()).dtype if tensor.is_floating_point() else None
    return tensor.to(engine.device, dtype)


if __name__ == "__main__":
    main()
