"""Made-up fits for the tests of reports and of the CLI."""

from __future__ import annotations

from autods.report import FitReport, Throughput
from autods.report.results.fit import ClosestRung, FitQuestion, Spread
from autods.system.host import Hardware
from autods.types import (
    Failed,
    Fit,
    Knobs,
    Outcome,
    OutOfMemory,
    Phase,
    Purpose,
    Record,
    Skipped,
    Tier,
    TierUse,
    Timing,
    Trial,
)

MIB = 2**20
LIMIT = 416 * MIB
LADDER = (
    "ddp",
    "zero1",
    "zero2",
    "zero2-offload",
    "zero3",
    "zero3-offload-optimizer",
    "zero3-offload-param",
    "zero3-offload",
    "zero3-nvme",
)
HARDWARE = Hardware(cpu="EPYC", cores=2, host_bytes=24 * 2**30, host_free_bytes=20 * 2**30, cards=())
WINNING = Knobs(
    micro_batch=4,
    accumulation=2,
    settings={"zero_optimization.reduce_bucket_size": 1_000_000, "zero_optimization.overlap_comm": True},
)


def memory(mib: float) -> dict[Tier, TierUse]:
    return {
        "device": TierUse(peak_bytes=int(mib * MIB), limit_bytes=LIMIT),
        "host": TierUse(peak_bytes=1300 * MIB, limit_bytes=64 * 1024 * MIB),
    }


def fit(mib: float = 380, rate: float = 12.34, losses: tuple[float, ...] = (7.6, 7.1)) -> Fit:
    return Fit(
        memory=memory(mib),
        samples_per_second=rate,
        tokens_per_second=rate * 64,
        step_s=(0.5, 0.6),
        spread=0.02,
        losses=losses,
        timing=Timing(wall_s=2.0, steps_s=1.1),
    )


def oom(phase: Phase = "init", rank: int = 1, wanted: float | None = 124.5, tier: Tier = "device") -> OutOfMemory:
    return OutOfMemory(
        tier=tier,
        rank=rank,
        phase=phase,
        evidence="DefaultCPUAllocator: can't allocate memory: you tried to allocate 130547712 bytes.",
        wanted_bytes=None if wanted is None else int(wanted * MIB),
        free_bytes=int(35.1 * MIB),
        limit_bytes=LIMIT,
    )


def failed() -> Failed:
    return Failed(
        failure="toolchain",
        rank=-1,
        phase="init",
        evidence="\n\nUnable to JIT load the async_io op: libaio headers are missing\n  File ...",
        action="fix_environment",
        advice="apt-get install libaio-dev",
    )


def record(
    number: int, rung: str, outcome: Outcome, *, purpose: Purpose = "walk", knobs: Knobs | None = None, **trial: bool
) -> Record:
    asked = Trial(rung=rung, knobs=knobs or Knobs(), purpose=purpose, **trial)  # type: ignore[arg-type]
    return Record(id=number, trial=asked, outcome=outcome, seconds=1.9 + number)


def fitting_report(out: str = "autods-out/gpt-2xcpu-1a2b3c") -> FitReport:
    return FitReport(
        status="fit",
        rung="zero3",
        knobs=WINNING,
        ds_config={"zero_optimization": {"stage": 3}, "train_batch_size": 16},
        throughput=Throughput(samples_per_second=41.7, tokens_per_second=2668.8),
        spread=Spread(low=41.7, high=41.7, trials=1),
        memory=memory(393.4),
        trials=(
            record(1, "ddp", oom()),
            record(2, "zero1", oom("step", 0, 62.0)),
            record(3, "zero2", oom("backward", 0, None)),
            record(4, "zero2-offload", failed()),
            record(5, "zero3", fit()),
            record(6, "zero3", fit(393.4, 41.7), purpose="grow", knobs=WINNING),
            record(7, "zero3", oom("backward"), purpose="grow", knobs=Knobs(micro_batch=8)),
        ),
        skipped=(Skipped(rung="zero3-nvme", reason="no --nvme-path was given"),),
        reasons={
            "ddp": "left: out of memory on device, rank 1, init: wanted 124.5 MiB, 35.1 MiB free of 416.0 MiB",
            "zero3": "chosen: the first rung that fits",
            "zero3-offload": "not needed: a faster rung fits",
            "zero3-offload-param": "not needed: a faster rung fits",
            "grow": "micro batch 8 ran out of memory, 4 leaves 5 % of the device free",
            "tune": "16 trials; none was 3 % faster than the start",
        },
        largest_micro_batch=6,
        versions={"torch": "2.13.0"},
        hardware=HARDWARE,
        question=FitQuestion(
            workload="gpt",
            parameters=32_638_976,
            gpus=2,
            device="cpu",
            device_bytes=LIMIT,
            global_batch=16,
            profile="quick",
            ladder=LADDER,
        ),
        seconds=83.2,
        out=out,
    )


def hopeless_report(exact: bool = True) -> FitReport:
    return FitReport(
        status="nothing_fits",
        trials=(
            record(1, "ddp", oom()),
            record(2, "zero3", oom("init", 0, 48.0)),
            record(3, "zero3", fit(480), purpose="shortfall", limited=False),
        ),
        skipped=(Skipped(rung="zero3-nvme", reason="no --nvme-path was given"),),
        closest=ClosestRung(rung="zero3", missing_bytes=64 * MIB, exact=exact),
        question=FitQuestion(
            workload="gpt",
            gpus=2,
            device="cpu",
            device_bytes=LIMIT,
            ladder=LADDER,
            lacks_nvme=("zero3-nvme",),
        ),
        seconds=12.0,
        out="autods-out/gpt-2xcpu-1a2b3c",
    )
