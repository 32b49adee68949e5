"""How an outcome is told to the sampler: its score, and how far it is beyond the usable memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..forecast.values import RungForecast
from ..outcomes import Failed, Fit, OutOfMemory
from ..values import Record
from .ask import fits_within
from .finals import Score
from .foresight import Foresight, lacking_bytes
from .study import tell_failed

if TYPE_CHECKING:  # optuna is imported where it is used: reading this module stays cheap
    import optuna

_LEAST_EXCESS = 0.01  # share of the limit by which an out-of-memory at least overshot, for want of a figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """How an outcome is told to the sampler."""

    start: Record
    limit_bytes: int
    headroom: float
    foresight: Foresight
    score: Score

    @property
    def usable_bytes(self) -> float:
        return self.limit_bytes * (1 - self.headroom)

    def tell(self, study: optuna.Study, asked: optuna.Trial, answer: Record | RungForecast) -> None:
        """The constraint is the share of the limit beyond the usable memory: ≤ 0 leaves the headroom."""
        if isinstance(answer, Record):  # for whoever opens the study: which trial of the journal, and what it was
            asked.set_user_attr("trial", answer.id)
        asked.set_user_attr("outcome", self._outcome(answer))
        if isinstance(answer, RungForecast):  # not run: it cannot fit
            self._tell_full(study, asked, lacking_bytes(answer))
            return
        match answer.outcome:
            case Fit() as fit:
                margin = (fit.device_peak_bytes - self.usable_bytes) / self.limit_bytes
                asked.set_constraint("device_margin", max(margin, _LEAST_EXCESS) if fit.alloc_retries else margin)
                study.tell(asked, self.score(answer))
            case OutOfMemory() as out:
                # What the last allocation lacked says little of what the trial lacks; its forecast says more.
                forecast = self.foresight.forecast(answer.trial)
                device = None if forecast is None else forecast.memory.get("device")
                foreseen = 0 if device is None else device.peak_bytes - self.limit_bytes
                self._tell_full(study, asked, max(out.missing_bytes or 0, foreseen))
            case Failed() as failure:
                tell_failed(study, asked, failure.evidence[:200])

    def _outcome(self, answer: Record | RungForecast) -> str:
        if isinstance(answer, RungForecast):
            return "not run: cannot fit by the forecast"
        match answer.outcome:
            case Fit():
                return "fits" if fits_within(answer, self.usable_bytes) else "runs, but leaves no headroom"
            case OutOfMemory() as out:
                return f"out of {out.tier} memory"
            case Failed() as failure:
                return f"failed: {failure.failure}"

    def _tell_full(self, study: optuna.Study, asked: optuna.Trial, lacking_bytes: int) -> None:
        excess = max(lacking_bytes / self.limit_bytes, _LEAST_EXCESS)
        asked.set_constraint("device_margin", self.headroom + excess)
        # Running out says nothing of speed. A speed of 0 would dig a hole into the GP's picture of samples/s and spoil
        # the good points beside it; the start's speed neither attracts nor repels, and the constraint alone keeps the
        # search away. (Told as failed, the GP would not see the point at all.)
        study.tell(asked, self.score(self.start))
