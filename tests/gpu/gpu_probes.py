"""Small programs that ask a card, or the kernel beside it, one thing: `python tests/gpu/gpu_probes.py NAME cuda|cpu`.

Each prints one JSON object. `holds` is whether autods' assumption is right; None where the figures are the answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autods.devices.base import EXPANDABLE
from autods.devices.cuda import read_used_bytes
from autods.forecast.predict.prices import read_constants
from autods.rank.memory import CudaMeter, read_private_bytes, status_bytes
from autods.system.landlock import confine_writes

MIB = 2**20
_NEAR = 0.05


def main(argv: list[str]) -> int:
    print(json.dumps(PROBES[argv[0]](argv[1])), flush=True)
    return 0


def probe_resets(device: str) -> dict[str, Any]:
    """Does the meter keep a peak although the program resets torch's counters, as see_memory_usage(force=True) does?"""
    if device == "cpu":
        return {"holds": None, "not_asked": "CPU ranks have no such counters"}
    import torch

    meter = CudaMeter(None, 0)
    meter.start()
    tensor = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    del tensor
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory.reset_accumulated_memory_stats()
    peak = meter.peaks()["device_allocated"] or 0
    return {"holds": peak >= 512 * MIB, "peak_bytes": peak, "torch_bytes": torch.cuda.max_memory_allocated()}


def probe_pinned(device: str) -> dict[str, Any]:
    """Are page-locked pages of torch's allocator private memory of the process? autods adds them to it."""
    import torch

    size = 512 * MIB

    def read() -> dict[str, int]:
        return {**status_bytes("RssAnon", "RssFile", "RssShmem", "VmLck", "VmHWM"), "private": read_private_bytes()}

    if device == "cuda":
        torch.cuda.init()
    before = read()
    tensor = torch.zeros(size, dtype=torch.uint8, pin_memory=device == "cuda")
    after = {name: value - before.get(name, 0) for name, value in read().items()}
    counted = dict(getattr(torch.cuda, "host_memory_stats", dict)()) if device == "cuda" else {}
    outside = after["private"] < (1 - _NEAR) * tensor.numel()
    peaks = {name: int(value) for name, value in counted.items() if name.endswith("bytes.peak")}
    return {"holds": outside if device == "cuda" else None, "size": size, "grown_bytes": after, "torch": peaks}


def probe_landlock(device: str) -> dict[str, Any]:
    """Does CUDA start and compute in a process that may write in the trial's folders and the usual devices alone?"""
    caches = (str(Path.home() / name) for name in (".cache", ".nv", ".triton"))
    if not confine_writes((*caches, "/dev", "/proc", "/sys")):
        return {"holds": None, "not_asked": "this kernel has no Landlock"}
    import torch

    try:
        layer = torch.nn.Linear(256, 256, device=device)
        layer(torch.ones(4, 256, device=device)).sum().backward()
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"[:300]
    try:
        Path(tempfile.gettempdir(), "autods-landlock").touch()
        is_refused = False
    except OSError:
        is_refused = True
    return {"holds": error is None and is_refused, "error": error, "write_refused": is_refused}


_HOLD = """
import time, torch
held = torch.ones(2**28, device="cuda")
torch.cuda.synchronize()
print("up", flush=True)
time.sleep(600)
"""


def probe_freed(device: str) -> dict[str, Any]:
    """How long after SIGKILL does the driver give a process's memory back? autods waits three seconds."""
    before = _used()
    if device == "cpu" or before is None:
        return {"holds": None, "not_asked": "NVML shows no card"}
    holder = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    held = (_used() or 0) - before
    holder.send_signal(signal.SIGKILL)
    began = time.monotonic()
    holder.wait()
    gone_s = time.monotonic() - began
    while (_used() or 0) > before + 64 * MIB and time.monotonic() - began < 60:
        time.sleep(0.01)
    freed_s = time.monotonic() - began
    if held < 512 * MIB:
        return {"holds": None, "not_asked": "NVML did not show what the process held"}
    return {"holds": freed_s - gone_s < 3, "held_bytes": held, "gone_s": gone_s, "freed_s": freed_s}


def probe_returned(device: str) -> dict[str, Any]:
    """How long does torch's allocator take to give a piece of the card back and to take it again, with the card idle?

    A piece is a segment of its own, of 20 MiB and of 512 MiB, or a page of 20 MiB of an expandable segment.
    """
    if device == "cpu":
        return {"holds": None, "not_asked": "CPU ranks have no such allocator"}
    import torch

    free, _ = torch.cuda.mem_get_info()

    def time_pieces(size: int, pieces: int, tensors: int) -> float:
        """The least microseconds for each of the pieces, which so many tensors fill."""
        times = []
        for _ in range(5):
            held = [torch.empty(size * pieces // tensors, dtype=torch.uint8, device="cuda") for _ in range(tensors)]
            torch.cuda.synchronize()
            del held
            began = time.perf_counter()
            torch.cuda.empty_cache()
            held = [torch.empty(size * pieces // tensors, dtype=torch.uint8, device="cuda") for _ in range(tensors)]
            times.append(time.perf_counter() - began)
            del held
            torch.cuda.empty_cache()
        return 1e6 * min(times) / pieces

    large = max(1, min(16, free // 2 // (512 * MIB)))
    us = {"segments of 20 MiB": time_pieces(20 * MIB, 64, 64), "of 512 MiB": time_pieces(512 * MIB, large, large)}
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    apply(EXPANDABLE)
    us["pages of 20 MiB"] = time_pieces(20 * MIB, 64, 1)
    assumed = read_constants().efficiency.return_us
    return {"holds": all(assumed / 3 <= each <= 3 * assumed for each in us.values()), "us": us, "assumed_us": assumed}


def probe_compile(device: str) -> dict[str, Any]:
    """How long is the first step under torch.compile, and do its child processes work meanwhile?"""
    import torch

    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)]
    model = torch.compile(torch.nn.Sequential(*layers).to(device))
    times = []
    for _ in range(3):
        began = time.monotonic()
        model(torch.ones(8, 512, device=device)).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    children = os.times()
    return {"holds": None, "step_s": times, "children_cpu_s": children.children_user + children.children_system}


def _used() -> int | None:
    used = read_used_bytes(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return used[0] if used else None


PROBES: dict[str, Callable[[str], dict[str, Any]]] = {
    "resets": probe_resets,
    "pinned": probe_pinned,
    "landlock": probe_landlock,
    "freed": probe_freed,
    "compile": probe_compile,
    "returned": probe_returned,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
