"""Time what the device, its links and the host reach, one kind of work after another, on all ranks of a node.

A forecast has a price for each kind, see `forecast.predict.prices`. Sizes grow until a call takes long, so that the
same benchmark serves a card and a processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ..plain_text import read_text
from .distributed import Ranks
from .ops import build, get_builder, is_built
from .record import MeasureResult, Reading, ReadingKind

_MIB = 2**20
_ROUNDS, _ROUND_S, _MOST_CALLS = 3, 0.02, 200
_MATRICES = (512, 1024, 2048, 4096, 8192)
_LENGTHS = (512, 1024, 2048, 4096, 8192)
_MEMORY_MIB = (4, 16, 64, 256)
_COPIED_MIB = (1, 16, 128)
_MESSAGES = tuple(2**exponent for exponent in range(15, 29, 2))  # 32 KiB to 128 MiB
_HOST_MIB = 64  # beyond the caches of processors; malloc maps it anew
_ADAM_ELEMENTS = 2**24
_FILE_MIB = 256
_ADAM_BYTES = 28  # an element in fp32: parameter, gradient and two moments are read, all but the gradient are written


@dataclass(slots=True, kw_only=True)
class Benchmark:
    """Measures on this rank, at the same time as on all others; every rank makes the same calls.

    `synchronize` waits for the device, and `beat` tells that the rank is alive. `nvme` is a folder on the disk to
    measure. A size is left out where a call would take longer than `longest_s`.
    """

    ranks: Ranks
    device: str
    has_cards: bool
    synchronize: Callable[[], None]
    beat: Callable[[], None]
    nvme: Path | None = None
    longest_s: float = 0.25
    readings: list[Reading] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self) -> MeasureResult:
        """Return what was measured, and why parts were left out."""
        parts: Sequence[tuple[str, Callable[[], None]]] = (
            *((f"matmul in {name}", partial(self._multiply, name)) for name in self._dtypes),
            ("memory", self._add),
            ("reductions", self._reduce),
            ("attention", self._attend),
            ("launches", self._launch),
            ("pinned copies", partial(self._copy, "copy", alone=True)),
            ("pinned copies", partial(self._copy, "copy", alone=False)),
            ("pageable copies", partial(self._copy, "pageable_copy", alone=True)),
            ("pageable copies", partial(self._copy, "pageable_copy", alone=False)),
            *((name, partial(self._collect, name)) for name in ("all-reduce", "all-gather", "reduce-scatter")),
            ("host memory", self._work_on_host),
            ("CPU Adam", self._step_on_host),
            ("NVMe", self._read_disk),
        )
        for name, measure in parts:
            self.beat()
            self.ranks.wait()
            try:
                measure()
            except Exception as error:  # a part that this machine lacks costs the forecast its own price alone
                reason = read_text(error).strip().splitlines() or [type(error).__name__]
                self.left_out.append(f"{name}: {reason[0]}")
        return MeasureResult(readings=tuple(self.readings), left_out=tuple(dict.fromkeys(self.left_out)))

    @property
    def _dtypes(self) -> tuple[str, ...]:
        return ("fp32", "tf32", "fp16", "bf16") if self.has_cards else ("fp32", "bf16")

    def _time(
        self, call: Callable[[], Any], *, together: bool = False, wait: Callable[[], None] | None = None
    ) -> float:
        """Return the seconds of a call: the best round of several after a first one, which loads and allocates.

        `together`: all ranks make as many calls, as collectives need.
        """
        wait = wait or self.synchronize
        call()
        once_s = self._round(call, 1, wait)
        if together:
            once_s = self.ranks.mean(once_s)
        calls = max(1, min(_MOST_CALLS, int(_ROUND_S / once_s)))
        return min(self._round(call, calls, wait) for _ in range(_ROUNDS))

    @staticmethod
    def _round(call: Callable[[], Any], calls: int, wait: Callable[[], None]) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return max(1e-9, time.perf_counter() - began) / calls

    def _note(self, kind: ReadingKind, name: str, size: int, seconds: float, **more: Any) -> None:
        self.readings.append(Reading(kind=kind, name=name, size=size, seconds=seconds, **more))

    def _multiply(self, name: str) -> None:
        """Square matrices. fp32's are multiplied by the units of fp32, which torch has as its default."""
        former = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        try:
            for size in _MATRICES:
                first, second = (torch.randn(size, size, device=self.device).to(_dtype(name)) for _ in range(2))
                seconds = self._time(partial(torch.mm, first, second))
                moved = 3 * size**2 * first.element_size()
                self._note("matmul", name, size, seconds, flops=2.0 * size**3, bytes=moved)
                if 8 * seconds > self.longest_s:
                    break
        finally:
            torch.backends.cuda.matmul.allow_tf32 = former

    def _add(self) -> None:

        for size in _MEMORY_MIB:
            first, second, total = (torch.zeros(size * _MIB // 4, device=self.device) for _ in range(3))
            seconds = self._time(partial(torch.add, first, second, out=total))
            self._note("kernel", "add", size * _MIB, seconds, bytes=3 * size * _MIB)
            if 4 * seconds > self.longest_s:
                break

    def _reduce(self) -> None:
        """A norm and a softmax with their gradients, and the sum of a bias's gradient: most of a step's reductions."""
        aten = torch.ops.aten
        rows, columns = (4096, 4096) if self.has_cards else (1024, 1024)
        values = torch.randn(rows, columns, device=self.device).to(self._main_dtype)
        weight, bias = values[0].clone(), values[1].clone()

        def call() -> None:
            _, mean, rstd = aten.native_layer_norm(values, [columns], weight, bias, 1e-5)
            aten.native_layer_norm_backward(values, values, [columns], mean, rstd, weight, bias, [True, True, True])
            logs = aten._log_softmax(values, 1, False)
            aten._log_softmax_backward_data(values, logs, 1, values.dtype)
            aten.sum(values, [0])

        passes = 2 + 3 + 2 + 3 + 1  # of the whole tensor
        size = values.numel() * values.element_size()
        self._note("reduction", "norm, softmax, sum", size, self._time(call), bytes=passes * size)

    def _attend(self) -> None:
        """Flash attention forward and backward, causal, of 2 samples and 16 heads of 128; else memory-efficient."""
        heads = 16 if self.has_cards else 2
        for length in _LENGTHS:
            shape = (2, heads, length, 128)
            query, key, value = (
                torch.randn(shape, device=self.device).to(self._main_dtype).requires_grad_() for _ in range(3)
            )

            def call(query: Any = query, key: Any = key, value: Any = value) -> None:
                with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
                    out = scaled_dot_product_attention(query, key, value, is_causal=True)
                torch.autograd.grad(out, (query, key, value), query)

            seconds = self._time(call)
            whole = query.numel() * query.element_size()
            flops = (
                7.0 * query.numel() * length
            )  # 2 products forward and 5 backward, of which a causal mask leaves half
            self._note("attention", str(self._main_dtype), length, seconds, flops=flops, bytes=12 * whole)
            if 4 * seconds > self.longest_s:
                break

    def _launch(self) -> None:
        """The host's time for an operator forward and backward, and for a view, on tensors of a few elements."""
        layers = [
            layer
            for _ in range(8)
            for layer in (
                torch.nn.Linear(32, 32, device=self.device),
                torch.nn.GELU(),
                torch.nn.LayerNorm(32, device=self.device),
            )
        ]
        network, values = torch.nn.Sequential(*layers), torch.randn(4, 32, device=self.device)

        def call() -> None:
            network(values).sum().backward()

        call()
        with _Counter() as counts:
            call()
        view = values.t
        view_s = self._time(lambda: [view() for _ in range(100)], wait=self._idle) / 100
        self._note("view", "t", 1, view_s)
        whole_s = min(self._round(call, 1, self.synchronize) for _ in range(20))
        operator_s = max(0.0, whole_s - counts.views * view_s) / counts.operators
        self._note("launch", "operator", counts.operators, operator_s)

    def _copy(self, kind: ReadingKind, *, alone: bool) -> None:
        """Between host and device, both ways: rank 0 alone, or all ranks at the same time."""
        if self.ranks.rank != 0 if alone else self.ranks.world_size == 1:
            return

        for size in _COPIED_MIB:
            there = torch.zeros(size * _MIB, dtype=torch.uint8, device=self.device)
            here = torch.zeros(size * _MIB, dtype=torch.uint8, pin_memory=kind == "copy")

            def call(there: Any = there, here: Any = here) -> None:
                there.copy_(here, non_blocking=True)
                here.copy_(there, non_blocking=True)

            name = "alone" if alone else "all ranks"
            self._note(kind, name, size * _MIB, self._time(call), bytes=2 * size * _MIB)

    def _collect(self, name: str) -> None:
        ranks = self.ranks.world_size
        if ranks == 1:
            raise RuntimeError("there is one rank")
        for size in _MESSAGES:
            whole = torch.zeros(size // 4, device=self.device)
            part = torch.zeros(size // 4 // ranks, device=self.device)
            whole = whole[: part.numel() * ranks]
            call: Callable[[], Any] = {
                "all-reduce": partial(dist.all_reduce, whole),
                "all-gather": partial(dist.all_gather_into_tensor, whole, part),
                "reduce-scatter": partial(dist.reduce_scatter_tensor, part, whole),
            }[name]
            seconds = self.ranks.mean(self._time(call, together=True))
            moved = (2 if name == "all-reduce" else 1) * whole.numel() * 4
            self._note("collective", name, size, seconds, bytes=moved)
            if 4 * seconds > self.longest_s:  # the mean of all ranks, so that all leave
                break

    def _work_on_host(self) -> None:
        """All threads of all ranks together, one thread of each, and memory that is new to the process."""
        size = _HOST_MIB * _MIB
        first, second, total = (torch.zeros(size // 4) for _ in range(3))
        idle = self._idle
        seconds = self._time(lambda: torch.add(first, second, out=total), wait=idle)
        self._note("host", "all threads", size, seconds, bytes=3 * size)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._note("host", "one thread", size, self._time(lambda: first.mul_(1), wait=idle), bytes=2 * size)
            seconds = self._time(lambda: torch.empty(size // 4).fill_(1), wait=idle)
            self._note("host", "first touch", size, seconds, bytes=size)
        finally:
            torch.set_num_threads(threads)

    def _step_on_host(self) -> None:
        if not is_built("cpu_adam"):
            raise RuntimeError("DeepSpeed's op is not built (autods doctor --fix)")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        build("cpu_adam")  # loads what is built
        weight = torch.nn.Parameter(torch.zeros(_ADAM_ELEMENTS))
        weight.grad = torch.ones(_ADAM_ELEMENTS)
        optimizer = DeepSpeedCPUAdam([weight])
        seconds = self._time(optimizer.step, wait=self._idle)
        self._note("host_optimizer", "CPU Adam", _ADAM_ELEMENTS, seconds, bytes=_ADAM_BYTES * _ADAM_ELEMENTS)

    def _read_disk(self) -> None:
        """Rank 0 writes and reads a file as DeepSpeed swaps, with the first values of the rung that swaps to NVMe."""
        if self.nvme is None:
            raise RuntimeError("no folder was named (--nvme-path)")
        if not is_built("async_io"):
            raise RuntimeError("DeepSpeed's async_io is not built (autods doctor --fix; apt-get install libaio-dev)")
        if self.ranks.rank != 0:
            return

        build("async_io")
        handle = get_builder("async_io").load(verbose=False).aio_handle(_MIB, 4, False, True, 1)
        buffer = handle.new_cpu_locked_tensor(_FILE_MIB * _MIB, torch.empty(0, dtype=torch.uint8))
        path, size = str(self.nvme / "benchmark"), _FILE_MIB * _MIB
        for name, call in (("write", handle.sync_pwrite), ("read", handle.sync_pread)):
            seconds = self._round(partial(move_file, call, buffer, path), 1, self._idle)
            self._note("nvme", name, size, seconds, bytes=size)

    @staticmethod
    def _idle() -> None:
        """Nothing but the host works, so that there is nothing to wait for."""

    @property
    def _main_dtype(self) -> Any:
        """That of most of a step's kernels."""
        if not self.has_cards:
            return torch.float32
        # DeepSpeed's accelerator also counts cards that only emulate bf16, such as V100 and T4.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def move_file(call: Callable[[Any, str, int], int], buffer: Any, path: str) -> None:
    """Write or read a file by async_io, which tells by a negative number alone that it did not."""
    if call(buffer, path, 0) < 0:
        raise OSError(f"DeepSpeed's async_io cannot open {path} for direct I/O")


def _dtype(name: str) -> Any:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and views, as a forecast does: a view returns another form of its argument."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        infos = [each.alias_info for each in func._schema.returns]
        is_view = any(info is not None and not info.is_write for info in infos)
        self.views += is_view
        self.operators += not is_view
        return func(*args, **(kwargs or {}))
