"""The certificate of a fit: what the winner is compared with, and what may stand in for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..checks import precision_of
from ..outcomes import Fit, failed_after_the_steps
from ..search.ask import fits_within
from ..search.candidates import Candidate
from ..search.certify import Certified, certify
from ..search.race import Raced
from ..search.tune import Tuned
from ..search.walk import tried
from ..values import Record, Trial
from .means import Means

# Losses of two configs that compute the same differ by rounding alone. Measured on CPU ranks, over rungs, cuts of the
# batch, buckets and checkpointing: up to 3e-7 in fp32, 5e-3 in bf16. A learning rate that is a tenth higher: 6e-3.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def certified_from(
    tuned: Tuned, raced: Raced, reference: Record, untried: Sequence[Candidate], means: Means
) -> Certified | None:
    """reference: the walk's winner. untried: rungs that may hold where nothing that is known does. None: not wanted."""
    settings, limits = means.settings, means.settings.profile.certify
    if limits.most_trials < 1:
        return None
    return certify(
        tuned.best,
        lambda trial: _examined(trial, means),
        alternates=(raced.best, *raced.others),
        reference=_largest(reference, means) if limits.parity is not None else None,
        steps=limits.steps,
        parity_steps=limits.parity or limits.steps,
        tolerance=max(TOLERANCE[one] for one in (precision_of(settings.base), *settings.precisions)),
        limit_bytes=settings.device_bytes,
        headroom=settings.profile.headroom,
        world_size=means.world_size,
        global_batch=settings.global_batch,
        most_trials=limits.most_trials,
        longest_ratio=means.facts.longest_ratio,
        seen=tuple(means.memory.records),
        leaner=_leaner(untried if settings.profile.race.stop == "first-fit" else (), means),
        alike=settings.source.kind == "script",
    )


def _largest(plain: Record, means: Means) -> Record:
    """The same config at the largest micro batch that is known to fit: it trains on the winner's samples, and at micro
    batch 1 that would take many times as long."""

    def cut(record: Record) -> Trial:
        knobs = replace(record.trial.knobs, micro_batch=1, accumulation=1)
        usual = replace(record.trial, purpose="walk", steps=plain.trial.steps, repeat=0, examined_from_s=None)
        return replace(usual, knobs=knobs)

    alike = [one for one in means.memory.records if cut(one) == cut(plain) and fits_within(one, means.usable_bytes)]
    return max([plain, *alike], key=lambda one: one.trial.knobs.micro_batch)


def _examined(trial: Trial, means: Means) -> Record:
    """A trial of the certificate: a disk too full for a checkpoint is said there, and ends no fit."""
    record = means.memory.run(trial)
    if failed_after_the_steps(record.outcome):
        return record
    return means.check(record)


def _leaner(untried: Sequence[Candidate], means: Means) -> Iterator[Record]:
    """Rungs that nobody tried yet, one at a time, as far as they fit."""
    for candidate in untried:
        last = tried(candidate, means.run, means.settings.profile.walk)[-1]
        if isinstance(last.outcome, Fit):
            yield last
