"""Made-up winners and exams for the tests of the certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autods.config.profiles import Budget, CertifyLimits
from autods.runner.testing import ScriptedRunner
from autods.runner.testing import fit as scripted_fit
from autods.tuner.candidates import list_candidates
from autods.tuner.certify import CertifyResult, certify
from autods.tuner.forecaster import NO_FORECASTER, Forecaster
from autods.types import Examined, Fit, Knobs, Outcome, Record, Scalar, Steps, Trial
from tests.support.contexts import make_context
from tests.support.walks import FACTS, SETTINGS

MIB = 2**20
LIMIT = 1000 * MIB
TIMED = Steps(warmup=2, timed=3, most_timed=12)
EXAM = Steps(warmup=1, timed=1)
PARITY = Steps(warmup=0, timed=6, most_timed=6)
DID = Examined(
    batch_shape=(8, 2048),
    draws=256,
    growth_bytes=0,
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
    global_batch: int | None = None,
    most_trials: int = 20,
    untried: Sequence[str] = (),
    alike: bool = False,
    longest_ratio: float = 1.0,
    seen: Sequence[Record] = (),
    zero_init: bool = False,
    budget_s: float = 0.0,
    forecaster: Forecaster = NO_FORECASTER,
) -> Certifying:
    """Certify on two ranks. Without a reference no losses are compared; `untried` names rungs."""
    runner = ScriptedRunner(answer)
    source = replace(SETTINGS.source, kind="script") if alike else SETTINGS.source
    context = make_context(
        runner.run,
        facts=replace(FACTS, longest_ratio=longest_ratio),
        forecaster=forecaster,
        seen=seen,
        profile={
            "certify": CertifyLimits(most_trials=most_trials, steps=EXAM, parity=None if reference is None else PARITY)
        },
        source=replace(source, zero_init=zero_init),
        device_bytes=LIMIT,
        global_batch=global_batch,
        budget=Budget(seconds=budget_s),
    )
    rungs = [one for one in list_candidates(context.settings, FACTS, {}) if one.rung.name in untried]
    certified = certify(winner, context, alternates=alternates, reference=reference or winner, untried=rungs)
    assert certified is not None
    return Certifying(certified, runner.trials)
