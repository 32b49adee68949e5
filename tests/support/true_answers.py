"""Rough machines, and whether the answer of a search follows from what was measured there.

A rough machine is a made-up one (tests/support/surfaces.py) with what real ones add. `contradictions` holds the answer
and each reason of the report beside the records, and beside the truth that the machine knows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autods.tuner.batch_curve import WORTH_GROWING
from autods.tuner.fit_report import FitResult, build_report
from autods.tuner.trials import FitContext
from autods.types import Fit, Record, Trial
from autods.units import format_bytes
from tests.support.surfaces import Surface
from tests.support.walks import TOO_SMALL

_BUSY_SHARES = (0.0, 0.05, 0.15)  # of the trials at which other work begins
_TIMED = (("grow",), ("grow", "race"))  # growth may end before the last comparison, or be explained after it
_CLOSE = 1 / 16  # relative distance of two sizes below which growth tries nothing between them


@dataclass(slots=True)
class RoughSurface(Surface):
    """A surface whose kernels run in whole waves, and what else the seed draws.

    Peaks differ by a relative `peak_noise` from trial to trial. `least` is the smallest micro batch that trains.
    With `busy`, other work slows down some trials in a row: `slowdown` has a factor for each trial.
    """

    quantised: bool = True
    busy: bool = False
    peak_noise: float = 0.0
    least: int = 1
    slowdown: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        Surface.__post_init__(self)
        draw = random.Random(f"{self.seed} rough")
        self.peak_noise = draw.choice((0.0, 0.0, 0.002))
        self.least = draw.choice((1, 1, 1, 2, 4))
        share = draw.choice(_BUSY_SHARES) if self.busy else 0.0
        factors = [1.0]
        while len(factors) < 200:
            begins = draw.random() < share
            factors += [draw.uniform(1.2, 3.0)] * draw.randint(1, 6) if begins else [1.0]
        self.slowdown = factors

    def run(self, trial: Trial, *, id: int) -> Record:
        if trial.knobs.micro_batch < self.least:
            return Record(id=id, trial=trial, outcome=TOO_SMALL, seconds=1.0)
        record = Surface.run(self, trial, id=id)
        if not isinstance(fit := record.outcome, Fit):
            return record
        slower, noise = self.slowdown[id % len(self.slowdown)], random.Random(f"{self.seed} {id}")
        peak_bytes = int(fit.device_peak_bytes * (1 + noise.gauss(0, self.peak_noise)))
        slowed = replace(
            fit,
            memory={"device": replace(fit.memory["device"], peak_bytes=peak_bytes)},
            samples_per_second=fit.samples_per_second / slower,
            step_s=tuple(seconds * slower for seconds in fit.step_s),
        )
        return replace(record, outcome=slowed)


def slower_than_measured(surface: RoughSurface, context: FitContext, result: FitResult) -> float:
    """How many times as fast as the answer the fastest measured config that leaves the headroom truly is, less 1."""
    records = _Measured(context.memory.records, context).eligible()
    return max(surface.rate(record.trial) for record in records) / surface.rate(result.best.trial) - 1


def contradictions(surface: RoughSurface, context: FitContext, result: FitResult) -> list[str]:
    """The reasons of the report that do not follow from the measurements."""
    best = result.raced.best.trial
    usual = [record for record in context.memory.records if record.trial.exam is None and record.trial.limited]
    same = [
        record
        for record in usual
        if (record.trial.rung, record.trial.knobs.checkpointing) == (best.rung, best.knobs.checkpointing)
        and record.trial.purpose != "tune"
    ]
    reasons = build_report(result, context, seconds=1.0, fingerprint="").reasons
    grow = _Measured(same, context)
    found = [f"grow: {why}: {reasons['grow']}" for why in grow.why_wrong(reasons["grow"], surface, best)]
    for name, reason in reasons.items():
        ratio = re.search(r"([\d.]+) times as fast as", reason)
        if name in ("grow", "tune", "batch", "certify") or ratio is None:
            continue
        if reason.startswith("fastest of"):
            if float(ratio[1]) < 1 and "within noise" not in reason:
                found.append(f"{name}: a slower one won: {reason}")
        elif float(ratio[1]) > 1 and "within noise" not in reason:
            found.append(f"{name}: a faster one lost: {reason}")
    return found


@dataclass(frozen=True, slots=True)
class _Measured:
    """Records, and what they show of the sizes."""

    records: Sequence[Record]
    context: FitContext

    def eligible(self) -> list[Record]:
        """Trials of the usual batch whose config left the headroom in each, or has the smallest micro batch."""
        usual = [record for record in self.records if record.trial.exam is None and record.trial.limited]
        configs: dict[str, list[Record]] = {}
        for record in usual:
            configs.setdefault(f"{record.trial.rung} {record.trial.knobs}", []).append(record)
        smallest = min(record.trial.knobs.micro_batch for record in usual if isinstance(record.outcome, Fit))
        return [
            record
            for trials in configs.values()
            for record in trials
            if isinstance(record.outcome, Fit)
            and (all(map(self.context.fits, trials)) or record.trial.knobs.micro_batch == smallest)
        ]

    def why_wrong(self, reason: str, surface: RoughSurface, best: Trial) -> Iterator[str]:
        """What a reason to stop growth says that the records of this config do not show."""
        usable = self.context.usable_bytes
        sizes = {record.trial.knobs.micro_batch for record in self.records}
        fitting = max(record.trial.knobs.micro_batch for record in self.eligible())
        refused = min((size for size in sizes if size > fitting), default=None)
        between = [size for size in self.context.sizes if refused is not None and fitting < size < refused]

        def truly_fits(size: int) -> bool:
            trial = replace(best, knobs=replace(best.knobs, micro_batch=size))
            return surface.peak_bytes(trial) * (1 + 3 * surface.peak_noise) <= usable

        is_missed = any(size >= fitting * (1 + _CLOSE) and truly_fits(size) for size in between)
        is_foreseen = reason.startswith(("by the forecast", "by its step times"))
        if is_missed and "a step of" not in reason and not is_foreseen and not surface.busy:
            yield f"sizes between {fitting} and {refused} were missed"
        if match := re.match(r"micro batch (\d+)( already)? needs (.+), which does not leave the headroom", reason):
            peaks = [r.outcome.device_peak_bytes for r in self._of_size(int(match[1])) if isinstance(r.outcome, Fit)]
            if not any(peak > usable and format_bytes(peak) == match[3] for peak in peaks):
                yield "no trial needed that much"
        elif match := re.match(r"micro batch (\d+) ran out of device memory", reason):
            if not any(record.outcome.kind == "out_of_memory" for record in self._of_size(int(match[1]))):
                yield "no trial ran out"
        elif match := re.match(
            r"by the (?:line through the measured peaks|forecast) micro batch (\d+) fills the .* headroom", reason
        ):
            if not fitting <= int(match[1]) or truly_fits(int(int(match[1]) * (1 + _CLOSE)) + 2):
                yield "a larger one fits"
        elif match := re.match(
            r"all \d+ trials are spent: micro batch (\d+) fits, and no larger one was tried", reason
        ):
            if int(match[1]) != fitting or refused is not None:
                yield "a larger one was tried"
        elif match := re.match(
            r"a step of micro batch (\d+) would take about ([\d.]+) s, more than the ([\d.]+)", reason
        ):
            if self._of_size(int(match[1])) or float(match[2]) < float(match[3]):
                yield "it was tried, or is not too long"
        elif match := re.match(r"micro batch (\d+) is only ([\d.]+) times as fast as (\d+); .* about (\d+)", reason):
            ratios = {f"{_rate(self._of_size(int(match[1])), purposes) / slow:.2f}" for purposes in _TIMED
                      if (slow := _rate(self._of_size(int(match[3])), purposes))}  # fmt: skip
            if match[2] not in ratios or not fitting <= int(match[4]) < (refused or int(match[4]) + 1):
                yield "the measurements show another ratio or limit"
        elif match := re.match(r"by the forecast micro batch \d+ is only ([\d.]+) times as fast as (\d+)", reason):
            if int(match[2]) != fitting or float(match[1]) > WORTH_GROWING:
                yield "it promises a gain"
        elif match := re.match(r"by its step times micro batch (\d+) is at most ([\d.]+) times as fast", reason):
            if self._of_size(int(match[1])) or float(match[2]) > WORTH_GROWING:
                yield "it was measured, or promises a gain"
        elif match := re.match(r"the race ended before micro batch (\d+) was measured( again)?", reason):
            if bool(self._of_size(int(match[1]))) is not bool(match[2]):
                yield "it was measured"
        elif not re.match(r"micro batch \d+ is (the largest that may be tried|a rank's whole share)", reason):
            yield "this reason is not known"

    def _of_size(self, size: int) -> list[Record]:
        return [record for record in self.records if record.trial.knobs.micro_batch == size]


def _rate(records: Sequence[Record], purposes: Sequence[str]) -> float:
    """The fastest timing of these purposes; 0 where there is none."""
    timed = [record.outcome for record in records if record.trial.purpose in purposes]
    return max((outcome.samples_per_second for outcome in timed if isinstance(outcome, Fit)), default=0.0)
