"""The settings of a run: a `RunRequest` checked against this machine."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.settings import Settings, resolve_fit
from ..errors import InputError
from ..rank.training_run.checkpoints import list_checkpoints
from ..report.results import Report
from ..requests import RunRequest
from ..system.host import Hardware
from ..types import WorkloadSource
from .run_journal import RunHistory

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
            "workload": fit.source.path if fit.source.kind != "pickle" else fit.source.name,
            "arguments": " ".join(fit.source.argv),
            "--device": fit.device,
            "--gpu-memory": fit.device_bytes if fit.device_bytes_asked else None,
            "--global-batch": fit.global_batch,
            "--data": self.data,
            "--seed": fit.seed,
            "base config": hashlib.sha256(base).hexdigest()[:8],
        }

    def is_done(self, history: RunHistory) -> bool:
        """Whether the last call trained to the end, and no further steps are wanted now; or fewer than were done."""
        if self.steps is None:
            return history.ended == "done"
        last = list_checkpoints(self.out / "checkpoints").latest
        return last is not None and last.step >= self.steps + (history.ended != "done")

    def choose_interval(self, report: Report) -> int:
        """Return the optimizer steps between two checkpoints: given, or about every ten minutes by the fit's speed.

        A checkpoint that takes long to save is saved more rarely.
        """
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        assert report.throughput is not None
        assert report.knobs is not None
        checkpoint = report.certificate.checkpoint if report.certificate is not None else None
        save_s = (checkpoint.save_s if checkpoint is not None else None) or 0.0
        samples = report.knobs.train_batch(report.question.gpus)
        step_s = samples / report.throughput.samples_per_second
        return max(1, round(max(_SAVE_EVERY_S, save_s / _SAVE_SHARE) / step_s))


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
    _check_end(request, source, data)
    if data is not None:
        data = _check_data(data)
    fit = resolve_fit(request, source, hardware=hardware)
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


def _check_end(request: RunRequest, source: WorkloadSource, data: str | None) -> None:
    """Raise InputError where nothing says when the training ends."""
    if request.steps is not None:
        return
    has_dataset = data is not None
    if source.kind == "script":
        has_dataset = True
    elif source.kind == "file":
        has_dataset = has_dataset or "build_dataset" in Path(source.path).read_text(errors="replace")
    elif source.kind == "pickle":
        has_dataset = has_dataset or getattr(request.workload, "build_dataset", None) is not None
    if not has_dataset:
        raise InputError(
            "nothing says when the training ends", place=source.name, hint="give --steps N, of the optimizer"
        )


def _check_data(data: str) -> str:
    """Return the absolute path of data that is here, and anything else as it is: a name of the workload's."""
    path = Path(data)
    if not path.exists() and (path.is_absolute() or data.startswith(("./", "../"))):
        raise InputError("there is no such file or folder", place=f"--data {data}")
    return str(path.absolute()) if path.exists() else data
