"""Where no forecast is needed: of a small model a trial takes less time than the simulator's start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..forecast.values import RungForecast
from ..types import Failed, Fit, ModelFacts, OutOfMemory, Record, Trial
from .candidates import unforeseeable
from .forecasts import Foresight

# Parameters, gradients, fp32 copy and two moments of mixed precision; fp32 keeps 16.
_BYTES_A_PARAMETER = 18
_BESIDES = 64 * 2**20  # activations of one sample, buffers
_SHARE = 1 / 2  # of the device that this may fill
_SMALL = 200_000_000  # parameters; a trial of more takes longer than a simulation
_PEAK_SHARE = 1 / 8  # of the usable memory: a measured peak below it leaves growing a long way that needs no forecast


@dataclass(slots=True)
class Spared:
    """Asks `inner` only where its answer could save a trial that costs more than it does.

    A small model that obviously fits is tried at once, until something ran out of memory at micro batch 1, or at the
    smallest that it can be trained with; so is a model that nobody can forecast. What is not forecast is tried, so this
    costs trials, never an answer. facts: None before the model was looked at.
    """

    inner: Foresight
    facts: Callable[[], ModelFacts | None]
    device_bytes: int
    _peaks: dict[tuple[str, bool], int] = field(default_factory=dict)  # of the first trial, by rung and recomputing
    _first: int = 1  # micro batch: smaller ones cannot be trained
    _ran_out: bool = False

    @property
    def said(self) -> Mapping[str, RungForecast]:
        """The inner one's."""
        return self.inner.said

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Of those that will be asked for."""
        if not self._unforeseeable():
            self.inner.prepare([trial for trial in trials if not self.is_obvious(trial)])

    def settle(self) -> None:
        """As the inner one does."""
        self.inner.settle()

    def forecast(self, trial: Trial) -> RungForecast | None:
        """None as well where the trial obviously fits."""
        return None if self.is_obvious(trial) or self._unforeseeable() else self.inner.forecast(trial)

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """By the measured peak where that is small: what fits even if all of it grew; growing measures on there. None
        for a script's small model: each micro batch that is simulated is another run of the script, and a trial shows
        more in the same time."""
        peak = self._peaks.get((trial.rung, trial.knobs.checkpointing))
        if peak is None or peak > usable_bytes * _PEAK_SHARE or not self._small():
            spared = self._unforeseeable() or (self._is_script() and self._small())
            return None if spared else self.inner.largest(trial, sizes, usable_bytes)
        return max((size for size in sizes if size * peak <= usable_bytes * self._first), default=None)

    def saw(self, record: Record) -> None:
        """What a trial came to."""
        trial, outcome = record.trial, record.outcome
        if isinstance(outcome, Failed) and outcome.wants_larger_batch and not self._peaks:
            self._first = max(self._first, 2 * trial.knobs.micro_batch)
        if trial.knobs.micro_batch > self._first:
            return
        if isinstance(outcome, Fit):
            key = (trial.rung, trial.knobs.checkpointing)
            self._peaks[key] = max(self._peaks.get(key, 1), outcome.device_peak_bytes)
        self._ran_out |= isinstance(outcome, OutOfMemory)

    def _unforeseeable(self) -> bool:
        facts = self.facts()
        return facts is not None and unforeseeable(facts) is not None

    def _is_script(self) -> bool:
        facts = self.facts()
        return facts is not None and facts.config is not None

    def _small(self) -> bool:
        facts = self.facts()
        if facts is None or facts.parameters > _SMALL:
            return False
        return _BYTES_A_PARAMETER * facts.parameters + _BESIDES <= self.device_bytes * _SHARE

    def is_obvious(self, trial: Trial) -> bool:
        """Whether it is a small model's first trial, and nothing has run out yet."""
        return trial.knobs.micro_batch == self._first and not self._ran_out and self._small()
