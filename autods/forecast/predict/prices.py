"""Pieces of work, and how long each takes on a machine: a roofline for the card, bandwidths for links and the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf, sqrt
from typing import Literal

from ...config.catalogue import Machine, Rates
from ...schema import read_toml_as
from ...system.host import data_folder
from ..attention import FLASH_FROM

_G = 1e9
_HOPPER = (9, 0)
_PREFER_CUDNN = ((9, 0), (10, 0))  # torch's sdp_utils.cpp, check_prefer_cudnn_attention, with cuDNN from 9.15.1 on
_PLACES_OF_CUDNN = ("_scaled_dot_product_flash", "_scaled_dot_product_cudnn")  # it takes both calls
_IN_CACHE = 1 << 20  # bytes of host work that need no bandwidth of the memory
_DTYPES: Mapping[str, str] = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32",
    "float8_e4m3fn": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2": "fp8", "float8_e5m2fnuz": "fp8",
}  # fmt: skip
_WITHOUT_UNITS = ("bf16", "fp16", "tf32")  # where a card has none of its own, fp32's do the work


# What a piece of work is limited by. `view`, a call without a kernel, and `python`, DeepSpeed's own, cost the host time
# and nothing else.
WorkKind = Literal[
    "matmul", "attention", "kernel", "reduction", "view", "python", "copy", "pageable_copy", "collective", "host",
    "host_optimizer", "nvme",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The amount of one piece of work. `name` is its operator's, for people.

    `bytes` are read and written; of a collective, those that a ring of infinitely many ranks would move a rank.
    `fresh` of them are written to host memory that the process has just got from the system. `compared` elements of
    host memory become truth values.
    `dtype` is that of a matmul's operands. `aligned` says whether all its rows begin at multiples of 16 bytes.
    A collective has `ranks`, and `stride` is the distance of neighbours among all ranks. In a `pairwise` one each
    rank sends a part to every other, in a ring to its neighbour.
    `launches` counts calls without a kernel that follow one another, `opcodes` what Python's interpreter runs. Work
    that is not `sure` is a kernel of which only the tensors are known.
    """

    kind: WorkKind
    name: str = ""
    flops: float = 0.0
    bytes: int = 0
    fresh: int = 0
    compared: int = 0
    dtype: str = ""
    aligned: bool = True
    ranks: int = 1
    stride: int = 1
    launches: int = 1
    opcodes: int = 0
    pairwise: bool = False
    sure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of a machine's peaks that work reaches, and its fixed costs.

    A matmul computes at the card's `matmul_share`. Beside that its bytes pass the memory `matmul_traffic` times:
    tiles read operands again, and what they load first and write last waits for no compute. The units of fp32 compute
    at `fp32_matmul`, so slowly that loads hide behind it and power is no limit. Where rows are not aligned, the tensor
    cores reach `unaligned` of it, and `unaligned_from_hopper` on those cards.

    Fused attention reaches `attention` of the card's `attention_share` in long samples. It reaches half of that where
    it computes `attention_half_intensity` FLOPs a byte. cuDNN's kernel is up to `cudnn_attention` times as fast, and
    half of that at `cudnn_half_intensity`. The memory-efficient kernel is `efficient_attention` times as fast on cards
    with flash.

    A kernel reaches `memory` of the memory's bandwidth, and `reduction` where it sums over rows or columns.
    `kernel_us` is its least time on the card. The host pays `launch_us` to issue an operator, `view_us` a view,
    `collective_us` a collective, and `opcode_ns` an opcode of DeepSpeed's Python. It pays `return_us` for each piece of
    the card's memory that torch's allocator gives back and takes again. One thread of it moves `core_gb_per_s` at most,
    and writes memory that is new to the process at `first_touch_gb_per_s`. It takes `compare_ns` to make a truth value.

    A collective of W ranks begins after `first_step_us`, and a ring takes (W − 1) steps: `step_us` each within a node,
    `network_step_us` for one that leaves it. Filling a pipeline takes `pipeline` of the geometric mean of two times:
    this latency, and that of the bytes. So messages of a few megabytes do not have the full bandwidth. A collective
    delays kernels beside it: it takes `contention` of the multiprocessors, and its bytes pass the memory
    `collective_traffic` times.

    `unsure` is the share of work without a price that a forecast counts.
    """

    matmul_traffic: float
    fp32_matmul: float
    unaligned: float
    unaligned_from_hopper: float
    attention: float
    attention_half_intensity: float
    cudnn_attention: float
    cudnn_half_intensity: float
    efficient_attention: float
    memory: float
    reduction: float
    nvlink: float
    pcie_between_gpus: float
    network: float
    contention: float
    collective_traffic: float
    pinned_copy: float
    pageable_copy: float
    dram: float
    core_gb_per_s: float
    first_touch_gb_per_s: float
    compare_ns: float
    host_optimizer: float
    nvme: float
    launch_us: float
    view_us: float
    opcode_ns: float
    collective_us: float
    return_us: float
    kernel_us: float
    first_step_us: float
    step_us: float
    network_step_us: float
    pipeline: float
    unsure: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The shipped efficiencies, and bounds of a step's time as shares of its forecast.

    The upper bounds are `host_high` where a step waits for the host's work, and `launch_high` where for its launches.
    Work without a price of its own has `unsure_high`, and the rest `high`.
    """

    efficiency: Efficiency
    low: float
    high: float
    launch_high: float
    host_high: float
    unsure_high: float
    sources: Mapping[str, str]


@cache
def read_constants() -> Constants:
    """Read the shipped constants. Raises InputError that says what is wrong."""
    path = data_folder("configs") / "forecast" / "step_time.toml"
    hint, refusal = "compare with the shipped file", "does not hold the constants of step time"
    return read_toml_as(Constants, path, name="constants of step time", check=_check, hint=hint, refusal=refusal)


def _check(constants: Constants) -> None:
    highs = (constants.high, constants.launch_high, constants.host_high, constants.unsure_high)
    if not 0 < constants.low <= 1 <= min(highs):
        raise ValueError("low ≤ 1 ≤ high, launch_high, host_high and unsure_high does not hold")
    if any(getattr(constants.efficiency, name) < 0 for name in Efficiency.__dataclass_fields__):
        raise ValueError("no efficiency may be below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a piece of work costs: `launch_s` of the host, then `seconds` of its stream or of the host.

    `contention` is the share of its seconds by which it delays kernels of another stream. A price that is not `sure`
    is a guess: the work's operator or dtype has none.
    """

    launch_s: float
    seconds: float
    compute_bound: bool = False
    contention: float = 0.0
    sure: bool = True


# What no step can beat: every piece of work at the data sheet's rate, and nothing else costs time.
_AT_PEAK = Efficiency(
    matmul_traffic=0.0, fp32_matmul=1.0, unaligned=1.0, unaligned_from_hopper=1.0, attention=1.0,
    attention_half_intensity=0.0, cudnn_attention=1.0, cudnn_half_intensity=0.0, efficient_attention=1.0,
    memory=1.0, reduction=1.0, nvlink=1.0, pcie_between_gpus=1.0, network=1.0, contention=0.0,
    collective_traffic=0.0, pinned_copy=1.0, pageable_copy=1.0, dram=1.0, core_gb_per_s=inf,
    first_touch_gb_per_s=inf, compare_ns=0.0, host_optimizer=1.0, nvme=1.0, launch_us=0.0, view_us=0.0, opcode_ns=0.0,
    return_us=0.0, collective_us=0.0, kernel_us=0.0, first_step_us=0.0, step_us=0.0, network_step_us=0.0,
    pipeline=0.0, unsure=0.0,
)  # fmt: skip


class Unpriced(Exception):
    """The machine's file lacks a rate that the step needs; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices on one machine, of which `ranks_per_node` ranks share a node.

    `has_cudnn_attention` says whether torch takes cuDNN's attention where it prefers it, as torch does from 2.11 on.
    """

    machine: Machine
    ranks_per_node: int
    efficiency: Efficiency
    has_cudnn_attention: bool = True

    @classmethod
    def usual(cls, machine: Machine, ranks_per_node: int) -> PriceList:
        """The shipped efficiencies, or in place of them what was measured on the machine."""
        efficiency = replace(read_constants().efficiency, **machine.measured.known)
        return cls(machine=machine, ranks_per_node=ranks_per_node, efficiency=efficiency)

    @classmethod
    def at_peak(cls, machine: Machine, ranks_per_node: int) -> PriceList:
        """The least that work can cost on this machine: each kind at its peak rate, without any overhead.

        What has no price of its own costs nothing. Servers differ in what cards and ranks share, so that the bound
        counts on no sharing.
        """
        rates = machine.rates and replace(machine.rates, matmul_share=1.0, attention_share=1.0)
        links = machine.links and replace(machine.links, to_host_shared_by=1)
        machine = replace(machine, rates=rates, links=links, sockets=1)
        return cls(machine=machine, ranks_per_node=ranks_per_node, efficiency=_AT_PEAK)

    def price(self, work: Work) -> Price:
        """Return the price of a piece of work. Raises Unpriced."""
        ours, rates = self.efficiency, self._rates()
        launch_s, least_s = ours.launch_us * 1e-6, ours.kernel_us * 1e-6
        from_memory_s = work.bytes / (rates.memory_gb_per_s * _G * ours.memory)
        match work.kind:
            case "view":
                return Price(launch_s=work.launches * ours.view_us * 1e-6, seconds=0.0)
            case "python":
                return Price(launch_s=work.opcodes * ours.opcode_ns * 1e-9, seconds=0.0)
            case "matmul" | "attention":
                return self._compute(rates, work, from_memory_s)
            case "kernel":
                share = 1.0 if work.sure else ours.unsure
                return Price(launch_s=launch_s, seconds=share * from_memory_s + least_s, sure=work.sure)
            case "reduction":
                return Price(launch_s=launch_s, seconds=from_memory_s * ours.memory / ours.reduction + least_s)
            case "copy" | "pageable_copy":
                if self.machine.links is None:
                    raise Unpriced("the link to the host")
                # All ranks of a node copy at the same time. A pageable copy is so slow that it leaves room for others.
                sharing = min(self.machine.links.to_host_shared_by, self.ranks_per_node)
                share = ours.pinned_copy / sharing
                if work.kind == "pageable_copy":
                    share = min(share, ours.pageable_copy)
                speed = self.machine.links.to_host_gb_per_s * _G * share
                if work.kind == "pageable_copy":  # a thread of the driver's copies it through page-locked memory
                    speed = min(speed, ours.core_gb_per_s * _G)
                return Price(launch_s=launch_s, seconds=work.bytes / speed + 2 * least_s)
            case "collective":
                seconds = self._collect(work)
                contention = ours.contention + ours.collective_traffic * from_memory_s / seconds if seconds else 0.0
                return Price(launch_s=ours.collective_us * 1e-6, seconds=seconds, contention=min(1.0, contention))
            case "host" | "host_optimizer":
                if self.machine.dram_gb_per_s is None:
                    if work.bytes > _IN_CACHE:
                        raise Unpriced("the bandwidth of host memory")
                    return Price(launch_s=launch_s, seconds=0.0)
                return Price(launch_s=launch_s, seconds=self._work_on_host(work, self.machine.dram_gb_per_s))
            case "nvme":
                if self.machine.nvme_gb_per_s is None:
                    raise Unpriced("the bandwidth of NVMe")
                speed = self.machine.nvme_gb_per_s * _G * ours.nvme / self.ranks_per_node
                return Price(launch_s=launch_s, seconds=work.bytes / speed)

    def _compute(self, rates: Rates, work: Work, from_memory_s: float) -> Price:
        """The price of a matmul or of attention. Without a peak for the dtype it is a guess at the card's highest."""
        ours, units = self.efficiency, _find_units(rates, work.dtype)
        peak = _highest_peak(rates) if units is None else float(getattr(rates.tflops, units)) * 1e12
        sure = work.sure and units is not None
        counted = 1.0 if sure else ours.unsure
        if work.kind == "matmul" and units == "fp32":
            share, traffic = ours.fp32_matmul, 0.0
        elif work.kind == "matmul":
            share, traffic = rates.matmul_share, ours.matmul_traffic * from_memory_s
            peak = self._matmul_peak(rates, work, peak)
        else:
            intensity = work.flops / work.bytes if work.bytes else inf
            flash = ours.attention * rates.attention_share * _saturate(intensity, ours.attention_half_intensity)
            share, traffic = min(1.0, flash * self._kernel_gain(rates, work, intensity)), 0.0
        computed_s = counted * work.flops / (peak * share) if work.flops else 0.0  # unknown FLOPs: its bytes alone
        seconds = max(computed_s + traffic, from_memory_s if work.sure else counted * from_memory_s)
        return Price(
            launch_s=ours.launch_us * 1e-6, seconds=seconds + ours.kernel_us * 1e-6,
            compute_bound=computed_s > from_memory_s, sure=sure,
        )  # fmt: skip

    def _work_on_host(self, work: Work, dram_gb_per_s: float) -> float:
        """The seconds of a rank's threads. Ranks share the node's memory, and that of a single one is on its socket."""
        ours = self.efficiency
        share = ours.dram if work.kind == "host" else ours.host_optimizer
        most_gb_per_s = dram_gb_per_s * share / max(self.ranks_per_node, self.machine.sockets)
        used_gb_per_s = min(most_gb_per_s, self._threads * ours.core_gb_per_s)
        new_gb_per_s = min(most_gb_per_s, self._threads * ours.first_touch_gb_per_s)
        used_s = (work.bytes - work.fresh) / (used_gb_per_s * _G)
        compared_s = work.compared * ours.compare_ns * 1e-9 / self._threads
        return max(used_s, compared_s) + work.fresh / (new_gb_per_s * _G)

    @property
    def _threads(self) -> float:
        """The threads of a rank: its share of the cores, or without these what torchrun and accelerate start it with.

        That is one for each of several ranks. A single one has all cores.
        """
        if self.machine.cores is not None:
            return max(1, self.machine.cores // self.ranks_per_node)
        return inf if self.ranks_per_node == 1 else 1

    def _rates(self) -> Rates:
        if self.machine.rates is None:
            raise Unpriced("the device's peaks")
        return self.machine.rates

    def _matmul_peak(self, rates: Rates, work: Work, peak: float) -> float:
        """FLOP/s. Tensor cores load rows of 16 bytes; the units of fp32 do not need them."""
        ours = self.efficiency
        if work.aligned:
            return peak
        share = ours.unaligned_from_hopper if (rates.capability or _HOPPER) >= _HOPPER else ours.unaligned
        return max(peak * share, min(peak, rates.tflops.fp32 * 1e12))

    def _kernel_gain(self, rates: Rates, work: Work, intensity: float) -> float:
        """How fast the kernel is beside flash attention. cuDNN's takes its place, and gains in longer sequences."""
        ours, capability = self.efficiency, rates.capability
        if work.name.startswith("_scaled_dot_product_efficient"):
            return ours.efficient_attention if (capability or FLASH_FROM) >= FLASH_FROM else 1.0
        takes_cudnn = self.has_cudnn_attention and capability in _PREFER_CUDNN
        if not takes_cudnn or not work.name.startswith(_PLACES_OF_CUDNN):
            return 1.0
        return max(1.0, ours.cudnn_attention * _saturate(intensity, ours.cudnn_half_intensity))

    def _collect(self, work: Work) -> float:
        """The seconds of a collective: latency, the slowest link's time for its bytes, and filling the pipeline."""
        ours, links = self.efficiency, self.machine.links
        if work.ranks < 2:
            return 0.0
        if links is None:
            raise Unpriced("the links between the GPUs")
        nvlink = links.nvlink_gb_per_s
        speed = links.between_gpus_gb_per_s * ours.pcie_between_gpus if nvlink is None else nvlink / 2 * ours.nvlink
        nodes = min(work.ranks, -(-work.ranks * work.stride // self.ranks_per_node))
        hops = (work.ranks - nodes, nodes - 1)
        moved = work.bytes * (work.ranks - 1) / work.ranks
        bytes_s = moved / (speed * _G)
        if nodes > 1:
            if links.network_gb_per_s is None:
                raise Unpriced("the network between the nodes")
            # Groups with the same stride use the node's network at the same time.
            rivals = min(work.stride, self.ranks_per_node)
            if work.pairwise:  # what each rank of the node has for ranks of other nodes
                members = -(-work.ranks // nodes)
                rivals *= members
                moved = work.bytes * (work.ranks - members) / work.ranks
            bytes_s = max(bytes_s, moved * rivals / (links.network_gb_per_s * _G * ours.network))
        if work.pairwise:  # all are sent at once
            hops = (min(1, hops[0]), min(1, hops[1]))
        latency_s = (ours.first_step_us + ours.step_us * hops[0] + ours.network_step_us * hops[1]) * 1e-6
        return latency_s + bytes_s + ours.pipeline * sqrt(latency_s * bytes_s)


def _saturate(intensity: float, half: float) -> float:
    """The share of a rate that work of so many FLOPs a byte reaches, where `half` of them reach half."""
    return 1.0 if intensity == inf else intensity / (intensity + half) if intensity else 0.0


def _find_units(rates: Rates, dtype: str) -> str | None:
    """Return the units that compute matmuls in this type, as `Tflops` names them; None where the card has no rate."""
    name = _DTYPES.get(dtype, "")
    if getattr(rates.tflops, name, None) is not None:
        return name
    return "fp32" if name in _WITHOUT_UNITS else None


def _highest_peak(rates: Rates) -> float:
    """Return the FLOP/s of the card's fastest 16-bit or fp32 units."""
    return max(rates.tflops.bf16 or 0.0, rates.tflops.fp16 or 0.0, rates.tflops.fp32) * 1e12
