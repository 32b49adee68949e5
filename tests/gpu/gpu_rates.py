"""The rates that a card, its link and its host reach, and what the host pays for an operator.

python tests/gpu/gpu_rates.py cuda|cpu      one JSON object, in about a minute

These are the figures behind configs/forecast/step_time.toml and configs/hardware/*.toml. Kernels of a card are timed as
a CUDA graph, so that the host's launches do not count. Every entry says its bytes or FLOPs, and its seconds.
`operators` is the profile of a training step of a model, operator by operator. An entry that fails says its error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from autods.rank.ops import ops_folder

os.environ["TORCH_EXTENSIONS_DIR"] = str(ops_folder())  # read when torch is imported

import torch
import torch.nn.functional as F

Entry = dict[str, Any]
MIB = 2**20
# Rows, inner and outer width of linear layers, from GPT-2 small to Llama-7B, and their vocabularies.
MATMULS = (
    (1024, 768, 768), (1024, 768, 3072), (4096, 768, 3072), (1024, 1280, 5120), (4096, 1280, 3840), (4096, 1280, 5120),
    (4096, 5120, 1280), (4096, 1600, 6400), (2048, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 11008),
    (8192, 8192, 8192), (16384, 4096, 16384), (1024, 1280, 50257), (4096, 1280, 50257), (4096, 1536, 151936),
)  # fmt: skip
# Batch, heads, sequence length, head size.
ATTENTIONS = ((4, 12, 1024, 64), (4, 20, 1024, 64), (1, 32, 2048, 128), (4, 32, 2048, 128), (2, 32, 8192, 128))
SIZES = (16 * 1024, MIB, 16 * MIB, 128 * MIB, 1024 * MIB)
PROFILED = (("gpt2-large", 1), ("gpt2-large", 4), ("qwen2-1.5b", 2))


class Clock:
    """Times work on a card as a graph, on a CPU as it is."""

    def __init__(self, device: str) -> None:
        self.device, self.on_card = device, device == "cuda"

    def synchronize(self) -> None:
        if self.on_card:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], calls: int = 10, replays: int = 5) -> float:
        """Return the least seconds of one call."""
        if not self.on_card:
            return min(self.wall(work) for _ in range(2))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / calls)
        return min(times)

    def wall(self, work: Callable[[], object]) -> float:
        """Return the wall seconds of one call, its work on the card included."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began


def main(argv: list[str]) -> int:
    clock = Clock(argv[0])
    parts = (matmuls, attentions, kernels, optimizers, launches, copies, allocations, host, host_optimizers, operators)
    said: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    for part in parts:
        began = time.monotonic()
        said[part.__name__] = list(_guarded(part(clock)))
        print(f"{part.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(said), flush=True)
    return 0


def _guarded(entries: Iterator[Entry]) -> Iterator[Entry]:
    try:
        yield from entries
    except Exception as error:  # what a card does that none of us has seen; the other parts go on
        yield {"error": f"{type(error).__name__}: {error}"[:500]}


def _timed(entry: Entry, measure: Callable[[], float]) -> Entry:
    try:
        return {**entry, "seconds": measure()}
    except Exception as error:
        return {**entry, "error": f"{type(error).__name__}: {error}"[:300]}


# ---- the card


def matmuls(clock: Clock) -> Iterator[Entry]:
    """A linear layer: its output, and the gradients of its input and of its weight."""
    for rows, inner, outer in MATMULS if clock.on_card else MATMULS[:1]:
        kinds = ("bfloat16", "float32", "tf32") if (rows, inner, outer) in MATMULS[5::3] else ("bfloat16",)
        for dtype in kinds:
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            typed = {"dtype": torch.bfloat16 if dtype == "bfloat16" else torch.float32, "device": clock.device}
            x, w, y = (torch.randn(shape, **typed) for shape in ((rows, inner), (outer, inner), (rows, outer)))
            said = {"dtype": dtype, "rows": rows, "inner": inner, "outer": outer, "flops": 2 * rows * inner * outer}
            products = {"output": lambda x=x, w=w: x @ w.t(), "grad_input": lambda y=y, w=w: y @ w}
            products |= {"grad_weight": lambda x=x, y=y: y.t() @ x}
            for name, work in products.items():
                yield _timed({**said, "product": name}, lambda work=work: clock.seconds(work))
            torch.backends.cuda.matmul.allow_tf32 = False


def attentions(clock: Clock) -> Iterator[Entry]:
    """Causal attention in bf16, forward and backward; flops as torch's registry counts, without the causal half."""
    for batch, heads, length, size in ATTENTIONS if clock.on_card else ATTENTIONS[:1]:
        shape = (batch, heads, length, size)
        q, k, v = (
            torch.randn(shape, device=clock.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )  # fmt: skip
        flops = 4 * batch * heads * length * length * size
        said = {"batch": batch, "heads": heads, "length": length, "head_size": size}

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(q: Any = q, k: Any = k, v: Any = v, forward: Any = forward) -> Any:
            out = forward()
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        yield _timed({**said, "pass": "forward", "flops": flops}, lambda: clock.seconds(forward, calls=5))
        yield _timed({**said, "pass": "both", "flops": 3.5 * flops}, lambda: clock.seconds(both, calls=5))


def kernels(clock: Clock) -> Iterator[Entry]:
    """Kernels bound by memory, by the bytes that they read and write."""
    for size in SIZES if clock.on_card else SIZES[:2]:
        count = size // 2
        x, y = (torch.randn(count, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
        rows = x.view(-1, 1024)
        weight = torch.ones(1024, device=clock.device, dtype=torch.bfloat16)
        wide = x.float()
        works: dict[str, tuple[int, Callable[[], object]]] = {
            "add": (3 * size, lambda x=x, y=y: x + y),
            "gelu": (2 * size, lambda x=x: F.gelu(x)),
            "copy": (2 * size, lambda x=x, y=y: y.copy_(x)),
            "fill": (size, lambda y=y: y.zero_()),
            "to_fp32": (3 * size, lambda x=x: x.float()),
            "to_bf16": (3 * size, lambda wide=wide: wide.bfloat16()),
            "layer_norm": (2 * size, lambda rows=rows, weight=weight: F.layer_norm(rows, (1024,), weight, weight)),
            "softmax_fp32": (4 * size, lambda wide=wide: torch.softmax(wide.view(-1, 1024), -1)),
            "sum_fp32": (2 * size, lambda wide=wide: wide.sum()),
            "transpose": (2 * size, lambda rows=rows: rows.t().contiguous()),
        }
        for name, (moved, work) in works.items():
            yield _timed({"kernel": name, "bytes": moved}, lambda work=work: clock.seconds(work))


def optimizers(clock: Clock) -> Iterator[Entry]:
    """AdamW over fp32 parameters in tensors of 4 Mi; it reads p, g, m, v and writes p, m, v: 28 bytes a parameter."""
    tensors, each = (50, 4 * MIB) if clock.on_card else (2, 2**16)
    for kind in ("foreach", "fused"):
        parameters = [torch.zeros(each, device=clock.device, requires_grad=True) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        adam = torch.optim.AdamW(parameters, lr=1e-4, **{kind: True})
        adam.step()
        said = {"kind": kind, "bytes": 28 * tensors * each}
        yield _timed(said, lambda adam=adam: min(clock.wall(adam.step) for _ in range(3)))
        del parameters, adam


def launches(clock: Clock) -> Iterator[Entry]:
    """What the host pays for a call that the card has long finished, and the least time of a kernel."""
    small = torch.ones(64, device=clock.device)
    grown = torch.ones(64, device=clock.device, requires_grad=True)
    rows = torch.ones(8, 64, device=clock.device)
    linear, norm = torch.nn.Linear(64, 64, device=clock.device), torch.nn.LayerNorm(64, device=clock.device)
    half = torch.ones(64, device=clock.device, dtype=torch.bfloat16)
    deep = torch.nn.Sequential(*[torch.nn.Linear(64, 64, device=clock.device) for _ in range(100)])

    def backward() -> None:
        deep(rows).sum().backward()

    works: dict[str, tuple[int, Callable[[], object]]] = {
        "add": (1, lambda: small + small),
        "add_with_grad": (1, lambda: grown + small),
        "add_in_place": (1, lambda: small.add_(1.0)),
        "linear_module": (1, lambda: linear(rows)),
        "layer_norm_module": (1, lambda: norm(rows)),
        "cast": (1, lambda: half.float()),
        "empty": (1, lambda: torch.empty(64, device=clock.device)),
        "view": (1, lambda: small.view(8, 8)),
        "transpose": (1, lambda: rows.transpose(0, 1)),
        "forward_of_100_linears": (100, lambda: deep(rows)),
        "forward_and_backward_of_100_linears": (100, backward),
    }
    for name, (calls, work) in works.items():
        yield _timed({"call": name}, lambda work=work, calls=calls: _host_seconds(clock, work, 300 // calls) / calls)
    yield _timed({"call": "kernel_in_a_graph"}, lambda: clock.seconds(lambda: small.add_(1.0), calls=500))
    yield _timed({"call": "synchronize"}, lambda: _host_seconds(clock, clock.synchronize, 300))
    yield _timed({"call": "item"}, lambda: _host_seconds(clock, lambda: small[0].item(), 300))


def _host_seconds(clock: Clock, work: Callable[[], object], calls: int) -> float:
    """The least seconds of one call of `calls`, without waiting for the card."""
    for _ in range(calls):
        work()
    times = []
    for _ in range(5):
        clock.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - began) / calls)
    return min(times)


# ---- the link and the host


def copies(clock: Clock) -> Iterator[Entry]:
    """Between host and card, from page-locked memory and from ordinary one; `both`: two streams at the same time."""
    if not clock.on_card:
        return
    other = torch.cuda.Stream()
    for size in (64 * 1024, 4 * MIB, 64 * MIB, 512 * MIB):
        for pinned in (True, False):
            ours = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
            theirs = torch.ones(size, dtype=torch.uint8, device="cuda")
            back, more = torch.empty_like(ours, pin_memory=pinned).fill_(1), torch.ones_like(theirs)
            said = {"bytes": size, "pinned": pinned}

            def both(ours: Any = ours, theirs: Any = theirs, back: Any = back, more: Any = more) -> None:
                theirs.copy_(ours, non_blocking=True)
                with torch.cuda.stream(other):
                    back.copy_(more, non_blocking=True)

            works = {
                "to_card": lambda o=ours, t=theirs: t.copy_(o, non_blocking=True),
                "to_host": lambda t=theirs, b=back: b.copy_(t, non_blocking=True),
            } | ({"both": both} if pinned else {})
            for name, work in works.items():
                yield _timed({**said, "way": name}, lambda work=work: min(clock.wall(work) for _ in range(4)))


def allocations(clock: Clock) -> Iterator[Entry]:
    """cudaMalloc and cudaFree through torch's allocator, and page-locked memory."""
    if not clock.on_card:
        return
    for size in (20 * MIB, 512 * MIB, 4096 * MIB):
        torch.cuda.empty_cache()
        held: list[Any] = []
        said = {"bytes": size}
        yield _timed({**said, "call": "cudaMalloc"}, lambda size=size, held=held: clock.wall(
            lambda: held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))))  # fmt: skip
        held.clear()
        yield _timed({**said, "call": "cudaFree"}, lambda: clock.wall(torch.cuda.empty_cache))
    for size in (MIB, 512 * MIB):
        yield _timed({"bytes": size, "call": "cudaHostAlloc"}, lambda size=size: clock.wall(
            lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True)))  # fmt: skip


def host(clock: Clock) -> Iterator[Entry]:
    """Host memory, by one thread and by all: new pages, copies, sums and comparisons; bytes read and written."""
    count = 64 * MIB  # of fp32
    threads = torch.get_num_threads()
    used, other = torch.ones(count), torch.ones(count)
    half = torch.ones(count, dtype=torch.bfloat16)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "fill_new": (4 * count, lambda: torch.ones(count)),
        "fill": (4 * count, lambda: used.fill_(1.0)),
        "copy": (8 * count, lambda: used.copy_(other)),
        "mul": (8 * count, lambda: used.mul_(1.0)),
        "fp32_to_bf16": (6 * count, lambda: half.copy_(used)),
        "bf16_to_fp32": (6 * count, lambda: used.copy_(half)),
        "norm": (4 * count, lambda: used.norm()),
        "isnan_new": (5 * count, lambda: used.isnan()),
    }
    for number in sorted({1, threads}):
        torch.set_num_threads(number)
        for name, (moved, work) in works.items():
            yield _timed(
                {"work": name, "threads": number, "bytes": moved}, lambda work=work: min(_wall(work) for _ in range(3))
            )
    torch.set_num_threads(threads)


def host_optimizers(clock: Clock) -> Iterator[Entry]:
    """DeepSpeedCPUAdam, where it can be loaded: p, g, m, v read and p, m, v written in fp32, 28 bytes a parameter."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    threads, count = torch.get_num_threads(), 64 * MIB
    for number in sorted({1, threads}):
        torch.set_num_threads(number)
        parameter = torch.zeros(count, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        for kind, adam in (("deepspeed", DeepSpeedCPUAdam([parameter])), ("torch", torch.optim.AdamW([parameter]))):
            adam.step()
            said = {"kind": kind, "threads": number, "bytes": 28 * count}
            yield _timed(said, lambda adam=adam: min(_wall(adam.step) for _ in range(2)))
            del adam
    torch.set_num_threads(threads)


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---- a training step, operator by operator


def operators(clock: Clock) -> Iterator[Entry]:
    """Forward and backward of models in bf16, without DeepSpeed; device_us: of all kernels of the operator."""
    import tempfile

    from gpu_cells import source

    from autods.workload.load import load

    for name, micro_batch in PROFILED if clock.on_card else (("tiny", 1),):
        with tempfile.TemporaryDirectory() as folder:
            workload = load(source(name, Path(folder)))
            model = workload.build_model().to(device=clock.device, dtype=torch.bfloat16).train()
            batch = {key: value.to(clock.device) for key, value in workload.build_batch(micro_batch).items()}
        yield _profile(clock, {"model": name, "micro_batch": micro_batch}, model, batch)
        del model, batch


def _profile(clock: Clock, said: Entry, model: Any, batch: Any) -> Entry:
    from torch.profiler import ProfilerActivity, profile

    def step() -> None:
        model(**batch).loss.backward()

    for _ in range(3):
        step()
        model.zero_grad(set_to_none=False)
    wall_s = min(clock.wall(step) for _ in range(3))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.on_card else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        clock.synchronize()
    rows = [
        {
            "operator": row.key,
            "shapes": str(row.input_shapes),
            "calls": row.count,
            "device_us": row.self_device_time_total,
        }
        for row in profiler.key_averages(group_by_input_shape=True)
        if row.self_device_time_total > 0 and row.key.startswith("aten::")
    ]
    rows.sort(key=lambda row: -float(row["device_us"]))
    return {**said, "wall_s": wall_s, "device_s": sum(row["device_us"] for row in rows) / 1e6, "rows": rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
