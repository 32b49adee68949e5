"""Trials of training scripts, and a user's folder that they must not change."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from autods.config.settings import Settings
from autods.rank.job import RankJob
from autods.runner.runner import RayRunner
from autods.types import Knobs, ModelFacts, Scalar, Steps, Trial, WorkloadSource
from tests.support.fits import TORCH_ADAM, ignore

STEPS = Steps(warmup=1, timed=3, most_timed=3)


@contextlib.contextmanager
def untouched(scripts: Path, folder: Path) -> Iterator[Path]:
    """A copy of the scripts in this folder, which must be unchanged at the end."""
    shutil.copytree(scripts, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest(folder)
    yield folder
    assert digest(folder) == before


@contextlib.contextmanager
def kept_runners(make_settings: Callable[..., Settings]) -> Iterator[Callable[..., RayRunner]]:
    """A function that takes a script's name and what else `make_settings` takes, and returns its surveyed runner.

    One zygote serves all questions about a script. Each question is surveyed once.
    """
    runners: dict[str, RayRunner] = {}
    surveyed: dict[str, tuple[Settings, ModelFacts | None]] = {}
    with contextlib.ExitStack() as stack:

        def runner_of(name: str, argv: tuple[str, ...], **options: object) -> RayRunner:
            key = repr((name, argv, options))
            if key not in surveyed:
                settings = make_settings(name, argv, **options)
                if name not in runners:
                    runners[name] = stack.enter_context(RayRunner(settings, ignore))
                runners[name].settings = settings
                runners[name].survey()
                surveyed[key] = runners[name].settings, runners[name].facts
            runners[name].settings, runners[name].facts = surveyed[key]
            return runners[name]

        yield runner_of


def digest(folder: Path) -> str:
    """A digest of all names and contents below the folder."""
    names_and_contents = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        names_and_contents.update(str(file).encode() + b"\0" + (file.read_bytes() if file.is_file() else b""))
    return names_and_contents.hexdigest()


def a_trial(
    rung: str, *, micro_batch: int = 4, accumulation: int = 2, checkpointing: bool = False, **options: Any
) -> Trial:
    """A trial with small buckets, and with torch's optimizer, for which no op has to be built."""
    settings: dict[str, Scalar] = {
        f"zero_optimization.{key}": 1_000_000 for key in ("reduce_bucket_size", "allgather_bucket_size")
    }
    settings |= TORCH_ADAM
    knobs = Knobs(micro_batch=micro_batch, accumulation=accumulation, checkpointing=checkpointing, settings=settings)
    return Trial(rung=rung, knobs=knobs, purpose="walk", **{"steps": STEPS, **options})


class Left(BaseException):
    """A trial ends its rank, whose process goes on here."""


def leave(end: object) -> NoReturn:
    """End the rank of a trial with a result or an error."""
    raise Left(end)


def script_job(**job: Any) -> RankJob:
    """The job of one rank for a script with these arguments, `argv` among them."""
    source = WorkloadSource(kind="script", path="/train.py", name="train", digest="", argv=tuple(job.pop("argv", ())))
    return RankJob(job="train", source=source, device="cpu", folder="/f", scratch="/s", **job)
