"""Made-up winners and exams for the tests of the certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autods.runner.testing import ScriptedRunner
from autods.runner.testing import fit as scripted_fit
from autods.tuner.certify import CertifyResult, certify
from autods.types import Examined, Fit, Knobs, Outcome, Record, Scalar, Steps, Trial

MIB = 2**20
LIMIT = 1000 * MIB
TIMED = Steps(warmup=2, timed=3, most_timed=12)
EXAM = Steps(warmup=1, timed=1)
PARITY = Steps(warmup=0, timed=6, most_timed=6)
DID = Examined(
    batch_shape=(8, 2048),
    draws=256,
    evaluated=True,
    checkpoint_bytes=640 * MIB,
    save_s=3.0,
    load_s=2.0,
    gathered=True,
    restored=True,
)


def trial(
    rung: str,
    micro_batch: int,
    *,
    accumulation: int = 1,
    checkpointing: bool = False,
    settings: Mapping[str, Scalar] | None = None,
    steps: Steps = TIMED,
) -> Trial:
    knobs = Knobs(
        micro_batch=micro_batch, accumulation=accumulation, checkpointing=checkpointing, settings=settings or {}
    )
    return Trial(rung=rung, knobs=knobs, purpose="grow", steps=steps)


def timed(config: Trial, id: int = 50, *, peak: int = 400 * MIB, speed: float = 10.0) -> Record:
    return Record(
        id=id,
        trial=config,
        outcome=scripted_fit(peak_bytes=peak, samples_per_second=speed, limit_bytes=LIMIT),
        seconds=1.0,
    )


def passes(asked: Trial, peak: int = 700 * MIB, retries: int = 0) -> Fit:
    """An exam that ran to its end, whatever it was."""
    ran = scripted_fit(peak_bytes=peak, limit_bytes=LIMIT, alloc_retries=retries, samples_per_second=7.0)
    if asked.exam == "worst_case":
        return replace(ran, losses=(2.0, 1.9), examined=DID)
    return replace(ran, losses=(2.0, 1.9, 1.8, 1.7, 1.6, 1.5))


@dataclass
class Certifying:
    certified: CertifyResult
    trials: list[Trial]

    @property
    def exams(self) -> list[tuple[str, int]]:
        return [(one.rung, one.knobs.micro_batch) for one in self.trials if one.exam == "worst_case"]

    @property
    def said(self) -> str:
        certificate = self.certified.certificate
        return "\n".join((*certificate.backed_off, *certificate.failures, *certificate.not_checked))


def certifying(
    answer: Callable[[Trial], Outcome],
    winner: Record,
    *,
    alternates: Sequence[Record] = (),
    reference: Record | None = None,
    tolerance: float = 0.02,
    global_batch: int | None = None,
    most_trials: int = 20,
    leaner: Iterable[Record] = (),
    alike: bool = False,
    longest_ratio: float = 1.0,
    seen: Sequence[Record] = (),
) -> Certifying:
    runner = ScriptedRunner(answer)
    certified = certify(
        winner,
        runner.run,
        alternates=alternates,
        reference=reference,
        steps=EXAM,
        parity_steps=PARITY,
        tolerance=tolerance,
        limit_bytes=LIMIT,
        headroom=0.05,
        world_size=2,
        global_batch=global_batch,
        most_trials=most_trials,
        leaner=leaner,
        alike=alike,
        longest_ratio=longest_ratio,
        seen=seen,
    )
    assert [record.trial for record in certified.records] == runner.trials
    return Certifying(certified, runner.trials)
