"""Opcodes of Python that DeepSpeed's ZeRO-3 adds to a step, beside torch's operators: what forecasts count (no GPU).

python tests/benchmarks/zero3_opcodes.py [--ranks 2]

Models of tiny modules train on one of several made-up ranks, whose collectives do nothing. Python's tracer counts the
opcodes of a micro batch and of an optimizer step. Those of the same model without DeepSpeed are taken off. Least
squares over models that differ in modules, parameters and buckets give the opcodes by cause. No clock is read, so that
other work on the machine changes nothing. DeepSpeed takes the paths of a GPU, with streams that do nothing.
autods/forecast/simulate/deepspeed_patches.py has the figures rounded; a module is fetched and released twice.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

_MOVED, _RESIDENT, _THRESHOLD = 128, 4, 64  # elements of parameters, and up to how many are never partitioned
# Modules, and of each of them: trainable parameters that move, resident ones, and frozen ones that move. Then elements
# of the prefetch bucket and of the reduce bucket.
_MODELS = (
    (10, 0, 1, 0, 0, 10**6), (20, 0, 1, 0, 0, 10**6), (20, 0, 4, 0, 0, 10**6), (10, 1, 0, 0, 0, 10**6),
    (20, 1, 0, 0, 0, 10**6), (20, 2, 0, 0, 0, 10**6), (20, 4, 0, 0, 0, 10**6), (20, 1, 0, 1, 0, 10**6),
    (20, 1, 0, 3, 0, 10**6), (20, 0, 1, 2, 0, 10**6), (20, 1, 2, 0, 0, 10**6), (20, 1, 0, 0, 600, 10**6),
    (20, 2, 0, 0, 1500, 10**6), (20, 4, 0, 0, 3000, 10**6), (20, 2, 0, 0, 0, 600), (20, 2, 2, 0, 600, 600),
)  # fmt: skip
_CALLS = ("gather", "partition", "reduce")


class Scale(nn.Module):
    """A module with so many parameters; each scales the input."""

    def __init__(self, trainable: int, resident: int, frozen: int) -> None:
        super().__init__()
        sizes = [_MOVED] * (trainable + frozen) + [_RESIDENT] * resident
        for number, size in enumerate(sizes):
            is_frozen = trainable <= number < trainable + frozen
            self.register_parameter(f"weight_{number}", nn.Parameter(torch.randn(size), requires_grad=not is_frozen))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight in self._parameters.values():
            hidden = hidden * weight[0]  # type: ignore[index]
        return hidden + 1


class Chain(nn.Module):
    """Such modules one after another."""

    def __init__(self, modules: int, *parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale(*parameters) for _ in range(modules))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.float().sum()


class Idle:
    """A stream or an event of a device that has nothing to do."""

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *error: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self, *others: Any) -> None: ...

    record = wait_stream = synchronize


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    calls = prepare(parser.parse_args().ranks)
    passes, steps = zip(*(measure(calls, *model) for model in _MODELS), strict=True)
    in_pass, in_step = [], []
    for (modules, trainable, resident, frozen, *_), (_, done) in zip(_MODELS, passes, strict=True):
        gradients, parameters = modules * (trainable + resident), modules * (trainable + resident + frozen)
        in_pass.append([1, modules, gradients, parameters, *(done[name] for name in _CALLS)])
        in_step.append([1, gradients, parameters, modules * resident])
    names = ("micro batch", "module", "gradient", "parameter of a module", *_CALLS)
    show("a micro batch", names, in_pass, [opcodes for opcodes, _ in passes])
    show("an optimizer step", ("step", "gradient", "parameter", "resident parameter"), in_step, list(steps))
    return 0


def prepare(ranks: int) -> Counter[str]:
    """Make this process rank 0 of so many; return the counter of DeepSpeed's calls."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29779"}
    os.environ.update(address, RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), DS_ACCELERATOR="cpu")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    import deepspeed.comm.torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3

    deepspeed.comm.torch.build_shm_op = lambda: None
    accelerator = type(get_accelerator())
    for name in ("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure"):
        setattr(accelerator, name, lambda self: False)
    for name in ("stream", "current_stream", "default_stream"):
        setattr(accelerator, name, lambda self, *which: Idle())
    accelerator.Stream = accelerator.Event = property(lambda self: Idle)
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]
    calls: Counter[str] = Counter()
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    methods = (
        (coordinator, f"_{coordinator.__name__}__all_gather_params_"),
        (partition_parameters.Init, "_partition"),
        (stage3.DeepSpeedZeroOptimizer_Stage3, "partition_grads"),
    )
    for call, (owner, name) in zip(_CALLS, methods, strict=True):
        setattr(owner, name, count_calls(getattr(owner, name), call, calls))
    return calls


def count_calls(method: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return method(*args, **kwargs)

    return call


def measure(calls: Counter[str], *model: int) -> tuple[tuple[int, Counter[str]], int]:
    """Return the opcodes of a micro batch with its calls, and those of an optimizer step."""
    import deepspeed

    *parameters, prefetched, reduced = model
    batch = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    plain = Chain(*parameters).bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": _THRESHOLD, "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": prefetched, "reduce_bucket_size": reduced,
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=Chain(*parameters), dist_init_required=False, config=config)

    def train() -> None:
        engine.backward(engine(batch))

    plain(batch).backward()
    for _ in range(4):
        train()
        engine.step()
    calls.clear()
    train()
    done = Counter(calls)
    engine.step()
    train()
    in_step = count_opcodes(engine.step)
    added = count_opcodes(train) - count_opcodes(lambda: plain(batch).backward())
    return (added, done), in_step


def count_opcodes(run: Callable[[], Any]) -> int:
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


def show(title: str, names: tuple[str, ...], causes: list[list[int]], opcodes: list[int]) -> None:
    """Print the opcodes by cause, and how far the worst model is from their sum."""
    matrix = numpy.array(causes, float)
    found, *_ = numpy.linalg.lstsq(matrix, numpy.array(opcodes, float), rcond=None)
    worst = numpy.abs(matrix @ found / opcodes - 1).max()
    parts = ", ".join(f"{name} {value:.0f}" for name, value in zip(names, found, strict=True))
    print(f"{title}: {parts}; within {worst:.1%}")


if __name__ == "__main__":
    sys.exit(main())
