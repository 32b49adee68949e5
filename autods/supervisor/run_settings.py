"""The settings of a run, a `RunRequest` checked against this machine, and the fit whose config the run trains with."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.deepspeed import BATCH_KEYS, count_replicas
from ..config.settings import Settings, name_training_options, refuse_shared_sequences, resolve_fit
from ..errors import InputError
from ..events import Note, RunListener
from ..journal import OtherFitError
from ..rank.training_run.checkpoints import list_checkpoints
from ..report import serialize
from ..report.results.fit import FitReport
from ..requests import RunRequest
from ..system.host import Hardware
from ..types import WorkloadSource
from .run_journal import RunHistory

FindFit = Callable[[Settings, RunListener], FitReport]
_SAVE_EVERY_S = 600.0  # lost work costs as much as a save every ten minutes, where a save takes 12 s
_SAVE_SHARE = 0.02  # of the time, where a save takes longer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run. `fit` are those of its fit, whose `out` is the fit's folder; `out` is the run's.

    `steps` is None where the workload decides when it ends, and `checkpoint_every` where the step time shall.
    """

    fit: Settings
    out: Path
    steps: int | None = None
    checkpoint_every: int | None = None
    data: str | None = None
    most_rescues: int = 10
    fresh: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """The options that a run may not change once it has begun, as they are compared and shown."""
        fit = self.fit
        base = json.dumps(fit.base, sort_keys=True).encode()
        return {
            "workload": fit.source.place,
            "arguments": " ".join(fit.source.argv),
            **name_training_options(fit.source),
            "--device": fit.device,
            "--gpu-memory": fit.device_bytes if fit.device_bytes_asked else None,
            "--global-batch": fit.global_batch,
            "--data": self.data,
            "--seed": fit.seed,
            "--precision": fit.precision,
            "base config": hashlib.sha256(base).hexdigest()[:8],
        }

    def is_done(self, history: RunHistory) -> bool:
        """Whether the last call trained to the end, and no further steps are wanted now; or fewer than were done.

        A script whose steps are not counted decides by itself when it is done.
        """
        is_uncounted = history.is_done and not history.attempts[-1].last_step
        if self.steps is None or is_uncounted:
            return history.is_done
        last = list_checkpoints(self.out / "checkpoints").latest
        return last is not None and last.step >= self.steps + (not history.is_done)

    def choose_interval(self, report: FitReport) -> int:
        """Return the optimizer steps between two checkpoints: given, or about every ten minutes by the fit's speed.

        A checkpoint that takes long to save is saved more rarely.
        """
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        return max(1, round(max(_SAVE_EVERY_S, read_save_s(report) / _SAVE_SHARE) / read_step_s(report)))


def read_step_s(report: FitReport) -> float:
    """Return the seconds of an optimizer step, by a fit that found a config.

    Its config has the samples of a step: ranks that make up one replica, as the stages of a pipeline do, count as one.
    """
    assert report.throughput is not None
    assert report.knobs is not None
    config = report.ds_config or {}
    samples = config.get(BATCH_KEYS[0]) or report.knobs.train_batch(count_replicas(config, report.question.gpus))
    return float(samples / report.throughput.samples_per_second)


def read_save_s(report: FitReport) -> float:
    """Return the seconds that a checkpoint took in the fit; 0 where it saved none."""
    checkpoint = report.certificate.checkpoint if report.certificate is not None else None
    return (checkpoint.save_s if checkpoint is not None else None) or 0.0


def resolve_run(request: RunRequest, source: WorkloadSource, *, hardware: Hardware) -> RunSettings:
    """Return the settings of a run. Raises InputError where the request cannot be done here."""
    for option, value, least in (
        ("--steps", request.steps, 1),
        ("--checkpoint-every", request.checkpoint_every, 1),
        ("--max-rescues", request.max_rescues, 0),
    ):
        if value is not None and value < least:
            raise InputError(f"{option} {value}: at least {least} is needed")
    data = None if request.data is None else os.fspath(request.data)
    if request.steps is None and data is None and not _brings_dataset(request, source):
        hint = "give --steps N, of the optimizer"
        raise InputError("nothing says when the training ends", place=source.name, hint=hint)
    if data is not None:
        if not source.form.is_model_config and not _brings_dataset(request, source):
            hint = "write def build_dataset(path): …, or drop --data"
            raise InputError("it defines no build_dataset, so --data has no effect", place=source.place, hint=hint)
        data = _check_data(data, is_name=not source.form.is_model_config)
    fit = refuse_shared_sequences(resolve_fit(request, source, hardware=hardware))
    out = fit.out if request.out is not None else fit.out.with_name(f"{fit.out.name}-run")
    folder = fit.out if request.out is None else fit.out / "fit"
    if request.fit is not None:
        folder = Path(request.fit).absolute()
        if not folder.is_dir():
            raise InputError("is no folder", place=f"--fit {request.fit}", hint="give the --out of a fit")
    return RunSettings(
        fit=replace(fit, out=folder, fresh=False),
        out=out,
        steps=request.steps,
        checkpoint_every=request.checkpoint_every,
        data=data,
        most_rescues=request.max_rescues,
        fresh=request.fresh,
    )


def _brings_dataset(request: RunRequest, source: WorkloadSource) -> bool:
    """Whether the workload itself says when the training ends. The code of a model.py is not run to find out."""
    if source.form.runs_as_main:
        return True
    if source.form.has_file:
        text = Path(source.path).read_text(errors="replace")
        return "build_dataset" in text or "import *" in text
    return getattr(request.workload, "build_dataset", None) is not None


def _check_data(data: str, *, is_name: bool) -> str:
    """Return the absolute path of data that is here; what may be a name of the workload's stays as it is."""
    path = Path(data)
    if not path.exists() and (not is_name or path.is_absolute() or data.startswith(("./", "../"))):
        raise InputError("there is no such file or folder", place=f"--data {data}")
    return str(path.absolute()) if path.exists() else data


def take_fit(
    settings: RunSettings, history: RunHistory, listen: RunListener, find_fit: FindFit, *, keep: bool = False
) -> tuple[RunSettings, FitReport]:
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
) -> tuple[RunSettings, FitReport]:
    assert history.prepared is not None
    ranks, total = settings.fit.gpus, history.decisions[-1].config.global_batch
    place = f"--gpus {ranks}"
    facts = history.prepared.facts
    replicas = count_replicas({**(facts.config or {}), **settings.fit.base}, ranks, facts)
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
