"""What a config measured: one value over all its timed trials, which every place that speaks of it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...types import TIERS, Fit, Knobs, Record, Tier, TierUse, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All timed trials of one config, in order. Other settings, such as those of tuning, make another config.

    Rates are those of all ranks together. `trial` is the first one. `is_finalist`: the last comparison of a race
    measured it again, beside others.
    """

    trial: Trial
    fits: tuple[Fit, ...]
    is_finalist: bool = False

    @property
    def samples_per_second(self) -> float:
        """The median."""
        return median(fit.samples_per_second for fit in self.fits)

    @property
    def tokens_per_second(self) -> float | None:
        """The median; None when a sample has no fixed length."""
        rates = [fit.tokens_per_second for fit in self.fits if fit.tokens_per_second is not None]
        return median(rates) if len(rates) == len(self.fits) else None

    @property
    def low_samples_per_second(self) -> float:
        """The least."""
        return min(fit.samples_per_second for fit in self.fits)

    @property
    def high_samples_per_second(self) -> float:
        """The most."""
        return max(fit.samples_per_second for fit in self.fits)

    @property
    def memory(self) -> Mapping[Tier, TierUse]:
        """The largest peak of each tier, and of what was in use there."""
        return join_memory(self.fits)

    @property
    def device_peak_bytes(self) -> int:
        """The largest peak of the device, as `Fit.device_peak_bytes` counts it."""
        return max(fit.device_peak_bytes for fit in self.fits)

    def leaves_headroom(self, usable_bytes: float) -> bool:
        """Whether each trial left the headroom, see `Fit.leaves_headroom`."""
        return all(fit.leaves_headroom(usable_bytes, self.trial.knobs) for fit in self.fits)

    def score(self, *, by_memory: bool) -> float:
        """What is higher for a better config: its rate, or a lower peak."""
        return -self.device_peak_bytes if by_memory else self.samples_per_second


def join_memory(fits: Sequence[Fit]) -> dict[Tier, TierUse]:
    """The largest peak of each tier in several trials of one config, and of what was in use there."""
    uses = {tier: [use for fit in fits if (use := fit.find_use(tier)) is not None] for tier in TIERS}
    return {tier: _join_uses(each) for tier, each in uses.items() if each}


def _join_uses(uses: Sequence[TierUse]) -> TierUse:
    """The largest peak, with the most that was in use where a trial measured it apart."""
    largest = max(uses, key=lambda use: use.peak_bytes)
    if all(use.in_use_bytes is None for use in uses):
        return largest
    return replace(largest, in_use_bytes=max(use.counted_bytes for use in uses))


def has_headroom(record: Record, usable_bytes: float) -> bool:
    """Whether the memory of a trial lets it count: False for one that ran and left no headroom.

    Exams and trials without a limit are not asked for headroom.
    """
    fit, trial = record.outcome, record.trial
    if not isinstance(fit, Fit) or trial.exam is not None or not trial.limited:
        return True
    return fit.leaves_headroom(usable_bytes, trial.knobs)


def measure_configs(records: Iterable[Record]) -> list[Measured]:
    """Each config that fitted within the limit, in the order of its first trial.

    Exams train on other samples, and the walk's trials are short: these count only where a config has no other.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if isinstance(record.outcome, Fit) and record.trial.exam is None and record.trial.limited:
            groups.setdefault(_key(record.trial.rung, record.trial.knobs), []).append(record)
    measured = []
    for group in groups.values():
        timed = [record for record in group if record.trial.purpose != "walk"] or group
        fits = tuple(record.outcome for record in timed if isinstance(record.outcome, Fit))
        is_finalist = any(record.trial.purpose == "race" for record in timed)
        measured.append(Measured(trial=group[0].trial, fits=fits, is_finalist=is_finalist))
    return measured


def find_measured(records: Iterable[Record], rung: str, knobs: Knobs) -> Measured | None:
    """The config of this rung with these knobs; None where it never fitted."""
    key = _key(rung, knobs)
    same = [record for record in records if _key(record.trial.rung, record.trial.knobs) == key]
    return next(iter(measure_configs(same)), None)


def _key(rung: str, knobs: Knobs) -> str:
    return f"{rung} {replace(knobs, settings=dict(sorted(knobs.settings.items())))}"
