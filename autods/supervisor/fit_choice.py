"""The fit whose config a run trains with: that of its folder, or another one where it gets another number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..config.settings import Settings
from ..errors import InputError
from ..events import Note, RunListener
from ..journal import OtherFitError
from ..report import serialize
from ..report.results import Report
from .run_journal import RunHistory
from .settings import RunSettings

FindFit = Callable[[Settings, RunListener], Report]


def take_fit(
    settings: RunSettings, history: RunHistory, listen: RunListener, find_fit: FindFit, *, keep: bool = False
) -> tuple[RunSettings, Report]:
    """Return the report of the run's fit, and the settings with its folder.

    A run that has begun keeps its fit, whatever has changed since. Only for another number of ranks does it take
    another one, with the global batch of the run; not where it is to `keep` its fit.
    Raises InputError where these ranks cannot share that batch.
    """
    if history.prepared is None or history.ranks_asked is None:
        try:
            return settings, find_fit(settings.fit, listen)
        except OtherFitError as error:
            hint = "name a fit with these options by --fit, or give another --out: --fresh forgets the run alone"
            raise InputError(error.problem, place=error.place, hint=hint) from None
    if keep or history.ranks_asked == settings.fit.gpus:
        settings = _with_folder(settings, Path(history.prepared.fit))
        with contextlib.suppress(InputError):
            return settings, serialize.read(settings.fit.out)
        return settings, find_fit(settings.fit, listen)
    return _take_other_fit(settings, history, listen, find_fit)


def _take_other_fit(
    settings: RunSettings, history: RunHistory, listen: RunListener, find_fit: FindFit
) -> tuple[RunSettings, Report]:
    assert history.prepared is not None
    ranks, total = settings.fit.gpus, history.decisions[-1].config.global_batch
    place = f"--gpus {ranks}"
    replicas = history.prepared.facts.replicas(ranks)
    if not replicas or total % replicas:
        raise InputError(
            f"the run's global batch of {total} cannot be split over {ranks} ranks",
            place=place,
            hint=f"give --gpus {history.ranks_asked} as before, or another divisor of {total}",
        )
    listen(Note(text=f"world size {ranks} instead of {history.ranks_asked}: a fit chooses the config"))
    report = None
    with contextlib.suppress(InputError):
        report = serialize.read(settings.fit.out)
    if report is None or report.status != "fit" or report.question.gpus != ranks:
        fit = replace(settings.fit, global_batch=total)
        # Each question has a folder: with other options a fit that found nothing is made anew.
        settings = _with_folder(settings, fit.out.with_name(f"{fit.out.name}-{ranks}-ranks-{fit.fingerprint()[:6]}"))
        report = find_fit(replace(fit, out=settings.fit.out), listen)
    if report.knobs is not None and report.knobs.train_batch(replicas) != total:
        raise InputError(
            f"its global batch is {report.knobs.train_batch(replicas)}, and that of the run is {total}",
            place=str(settings.fit.out),
            hint=f"make a fit with {place} --global-batch {total}, and name it with --fit",
        )
    return settings, report


def _with_folder(settings: RunSettings, folder: Path) -> RunSettings:
    return replace(settings, fit=replace(settings.fit, out=folder))
