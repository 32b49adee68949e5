"""CPU ranks with a memory budget, which stand in for GPUs: for tests, and for a first look without a card."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path

import psutil

from .base import Card, Device, Finding, Health

_LOOK_S = 0.25
_BUSY = 0.25  # of the processors: with less, two ranks on two cores lose no more than other noise takes
_CAPPED = 0.9  # of the highest clock
_PROCESSORS, _CPUINFO = Path("/sys/devices/system/cpu"), Path("/proc/cpuinfo")


class CpuDevice(Device):
    """Processors: psutil tells their load, and /sys their clocks, which many containers and virtual machines hide."""

    def examine(self, ranks: int) -> Health:
        return Health(findings=tuple(examine_processors(ranks)))

    def judge_precision(self, precision: str, cards: Iterable[Card]) -> Finding | None:
        if precision == "fp32" or multiplies_halves(read_processor_flags()):
            return None
        text = f"this processor lacks AVX-512, and multiplies {precision} up to a hundred times slower than fp32"
        return Finding(text=text, remedy="--precision fp32, where speed matters more than to stand in for a GPU")


def multiplies_halves(flags: Set[str]) -> bool:
    """Whether oneDNN multiplies bf16 on a processor with these flags of /proc/cpuinfo; torch's own loops do it else.

    Their rate on an EPYC with AVX2 alone was 0.3 GFLOP/s, where fp32 had 30. oneDNN's conditions are those of
    `has_bf16_type_support` in ideep. Without flags of an x86 processor it is taken for granted.
    """
    is_x86 = "sse2" in flags
    return not is_x86 or "avx_ne_convert" in flags or {"avx512bw", "avx512vl", "avx512dq"} <= flags


def read_processor_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Return the flags of the first processor; none where the kernel does not list them so."""
    return frozenset(read_processor_field("flags", path).split())


def read_processor_field(name: str, path: Path = _CPUINFO) -> str:
    """Return a field of the first processor in /proc/cpuinfo, such as 'model name'; '' where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        lines = []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(values, "")


def measure_load(measure: Callable[[], list[float]] = lambda: psutil.cpu_percent(_LOOK_S, percpu=True)) -> float:
    """Return the share of the processors that this process may use which was busy, for a moment.

    Those of other jobs on the machine do not count. `measure` returns the percentage of each processor.
    """
    usable = os.sched_getaffinity(0)
    loads = measure()
    ours = [load for number, load in enumerate(loads) if number in usable] or loads
    return sum(ours) / max(1, len(ours)) / 100


def examine_processors(
    ranks: int,
    *,
    measure_load: Callable[[], float] = measure_load,
    processors: Path = _PROCESSORS,
) -> Iterator[Finding]:
    """Yield what slows the ranks: too few processors, other load on them (before the ranks start), and slow clocks.

    `measure_load` takes a moment, and returns the share of the processors that was busy.
    """
    usable = len(os.sched_getaffinity(0))
    if ranks > usable:
        text = f"there are processors for {usable} of {ranks} ranks, so they wait for each other"
        yield Finding(text=text, remedy="give fewer --gpus, or more processors: taskset, docker --cpuset-cpus")
    throttled = _sum_numbers(processors, "thermal_throttle/core_throttle_count")
    if measure_load() > _BUSY:
        text = f"other processes keep over {_BUSY:.0%} of this machine's processors busy, so times say little"
        yield Finding(text=text, remedy="end them: top shows them")
    if _sum_numbers(processors, "thermal_throttle/core_throttle_count") > throttled:
        yield Finding(text="processors are too hot and run slower", remedy="look at the fans: sensors")
    allowed, most = (_sum_numbers(processors, f"cpufreq/{name}") for name in ("scaling_max_freq", "cpuinfo_max_freq"))
    if allowed < _CAPPED * most:
        text = f"processors may run at {allowed / most:.0%} of their highest clock"
        yield Finding(text=text, remedy="cpupower frequency-set --max raises it")


def _sum_numbers(processors: Path, name: str) -> int:
    """Return the sum of a file's numbers over all processors; 0 where /sys has no such file.

    The kernel refuses to read the clocks of a processor that is off, as half of them are where hyper-threading is.
    """
    total = 0
    for path in processors.glob(f"cpu[0-9]*/{name}"):
        with contextlib.suppress(OSError, ValueError):
            total += int(path.read_text())
    return total


CPU = CpuDevice(
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
    # oneDNN compiles a kernel of bf16 matmuls for each number of tokens that an expert gets, and keeps all of them:
    # half a gigabyte in five steps of a 7M mixture. Its kernel for processors without bf16 serves any number, at half
    # the speed. DEFAULT and 1024 are oneDNN's own values.
    # Freed memory goes back at once, see below, so each tensor is new memory. In pages of 4 KiB a step of a GPT-2 took
    # 1.3 times as long as in huge ones, for which malloc asks the kernel since glibc 2.35.
    default_variables={
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    },
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
