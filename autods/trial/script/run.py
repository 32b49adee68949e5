"""Run an unmodified training script as a trial, and say in words why it failed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ...types import WorkloadSource
from ...workload.protocol import WorkloadError
from ...workload.script_source import fill_placeholders, has_local_rank_parameter
from ..job import RankJob
from . import cpu_ranks, engine_hooks, sandbox
from .callsite import Place, of_traceback, refusal
from .session import Enough, Session

_TAIL, _NEAR, _LONGEST = 4096, 12, 200  # bytes, lines and characters of what a script wrote at its end
_ERROR = re.compile(r"\b(?:error|fatal|exception|unknown|invalid|missing|required)\b", re.IGNORECASE)


def before_it_left(error: BaseException, session: Session) -> BaseException:
    """What a script had met that printed it and called `sys.exit(1)`: a call of its engine, or what it caught last."""
    if not isinstance(error, SystemExit):
        return error
    met = session.failure or error.__context__
    return met if isinstance(met, Exception) else error


def in_words(error: BaseException, job: RankJob) -> BaseException:
    """What ended the script, said in its own terms where the exception alone does not."""
    place = of_traceback(error)
    if job.device == "cpu" and (said := cpu_ranks.told_of_cuda(error, place)) is not None:
        return said
    if _waits_for_input(error, place):
        hint = "give it the answer as an argument, or in a file"
        return refusal("it waits for input, and a trial has no terminal", hint=hint, at=place)
    if isinstance(error, ImportError) and (of_import := _of_import(error)) is not None:
        return refusal(of_import[0], hint=of_import[1], at=place)
    if isinstance(error, ModuleNotFoundError) and error.name and place is not None:
        hint = f"install it into the Python that autods runs in, {sys.executable}"
        return refusal(f"it needs {error.name}, which is not installed here", hint=hint, at=place)
    if isinstance(error, SystemExit):
        how = f"with exit code {error.code}" if isinstance(error.code, int) else f"and said: {error.code}"
        quoted = _last_words()
        last = f"; the last that it wrote: {quoted}" if quoted and isinstance(error.code, int) else ""
        return refusal(f"it left {how}{last}", hint="why may stand in its log, above the end", at=place)
    return error


def _of_import(error: ImportError) -> tuple[str, str] | None:
    """What is wrong, and how to fix it, of an import that found its package."""
    cause = error.__cause__  # a library that loads its parts when they are asked for tells what it met in its own words
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not None:
        words = str(cause).strip().partition("\n")[0]
        what = f"{str(error).partition('. ')[0].rstrip('.')}, because of {type(cause).__name__}: {words}"
        return what, f"the packages in {sys.executable} do not go together: reinstall that one, or take another version"
    package, _, part = (error.name or "").partition(".")
    if package and (part or "cannot import name" in str(error)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            hint = f"{package} {version} is installed here: the script was written for another version of it"
            return str(error).partition(" (")[0], hint
    return None


def _waits_for_input(error: BaseException, place: Place | None) -> bool:
    """Whether it read its standard input, which is empty: a parser of JSON or YAML says that in words of its own."""
    asked = "EOF when reading a line" in str(error) if isinstance(error, EOFError) else False
    return asked or (isinstance(error, ValueError) and place is not None and "sys.stdin" in place.code)


def _last_words() -> str:
    """The last line of this rank's log, or the last that speaks of an error where there is one near the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
            text = log.read(_TAIL).decode(errors="replace")
    except OSError:  # no file: a terminal, or a pipe
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_NEAR:]
    telling = [line for line in lines if _ERROR.search(line)]
    return (telling or lines or [""])[-1][:_LONGEST]


_TOLD = 20  # files


def run(
    job: RankJob,
    slot: int,
    observer: Any,
    store: socket.socket | None,
    leave: Callable[[dict[str, Any] | BaseException], NoReturn],
    session_of: Callable[..., Session] = Session,
) -> dict[str, Any]:
    """What was seen of the script: its facts (`ModelFacts`) after a survey, else what its steps showed.

    leave: ends this process with such a result, or an error, where the script does not let itself be ended. session_of:
    makes the session; a forecast has one of its own. Raises
    what ended the script before the trial had enough; WorkloadError where that can be said in words that help.
    """
    session = session_of(job=job, slot=slot, observer=observer, leave=leave)
    cpu_ranks.install(job, slot, store, session.stood_in)
    try:
        engine_hooks.install(session)
    except ImportError as error:  # of the library that the script's kind is named after
        raise in_words(error, session.job) from error
    session.batches.watch_loaders()
    pid = os.getpid()
    overlay = sandbox.install(session)
    _prepare(session)
    observer("build", 0)
    died: BaseException | None = None
    try:
        _as_main(job.source)
    except Enough:
        pass
    except BaseException as error:
        if os.getpid() != pid:
            _end_child(session, error)
        if not session.over and not _left_quietly(error):
            died = before_it_left(error, session)
    if os.getpid() != pid:
        os._exit(0)  # a child that it forked and let run on
    if died is not None:
        _raise(died, session)
    if overlay.wrote:
        print(f"autods: kept out of your folders: {', '.join(overlay.wrote[:_TOLD])}", flush=True)
    if session.failure is not None:
        _raise(session.failure, session)
    if not session.over:
        _check_ended_well(session)
        session.ended()
    observer("done", session.steps)
    return session.result()


def _prepare(session: Session) -> None:
    """Its working directory, its arguments, its modules, as a launcher would have them."""
    job = session.job
    config = Path(job.scratch) / f"ds_config.rank{job.local_ranks[session.slot]}.json"
    config.write_text(json.dumps(session.file, indent=2))
    values = {
        "ds_config": config,
        "micro_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "train_batch_size": job.train_batch,
    }
    os.chdir(job.source.folder or Path(job.source.path).parent)
    sys.argv = [job.source.path, *fill_placeholders(job.source.argv, values)]
    if has_local_rank_parameter(job.source):
        sys.argv.append(f"--local_rank={job.local_ranks[session.slot]}")
    sys.path.insert(0, os.getcwd() if job.source.module else str(Path(job.source.path).parent))
    sys.dont_write_bytecode = True


def _as_main(source: WorkloadSource) -> None:
    """As `python FILE` or `python -m MODULE`."""
    if source.module is None:
        runpy.run_path(source.path, run_name="__main__")
    else:
        runpy.run_module(source.module, run_name="__main__", alter_sys=True)


def _left_quietly(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _raise(error: BaseException, session: Session) -> NoReturn:
    """What ended the script, in words that help where there are any."""
    said = in_words(error, session.job)
    if said is error:
        raise error
    raise said from error


def _end_child(session: Session, error: BaseException) -> NoReturn:
    """In a child that the script forked: what it died of is for the log, and for the parent if it was the training."""
    if isinstance(error, WorkloadError):
        Path(session.job.scratch, "forked").touch()
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _check_ended_well(session: Session) -> None:
    """Raises WorkloadError when the script ended before the trial has seen what it came for."""
    job = session.job
    if Path(job.scratch, "forked").exists():
        raise refusal("it trains in a process that it forked", hint="start no ranks in the script, a trial does")
    if session.engine is None:
        raise refusal(
            "it ended and never called deepspeed.initialize",
            hint="a trial is a run of the script that trains: is an argument missing after --, or --kind wrong?",
        )
    wanted = job.steps.warmup + 1
    whole = len(session.clock.times)
    if whole < wanted:
        raise refusal(
            f"it ended after {whole} optimizer step{'s' * (whole != 1)} of micro batch {job.micro_batch}, "
            f"and a trial needs {wanted} at least",
            hint="give it more data, more epochs or a larger max_steps after --",
        )
