"""Run the script as `__main__`, and make a result, or what it died of, of the way it ended."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ...values import WorkloadSource
from ...workload import WorkloadError
from ...workload.script import filled, takes_local_rank_as_a_word
from ..spec import RankJob
from . import guard, hooks, machine
from .session import Enough, Session
from .users import refusal
from .words import before_it_left, in_words

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
    machine.install(job, slot, store, session.stood_in)
    try:
        hooks.install(session)
    except ImportError as error:  # of the library that the script's kind is named after
        raise in_words(error, session.job) from error
    session.batches.watch_loaders()
    pid = os.getpid()
    overlay = guard.install(session)
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
    sys.argv = [job.source.path, *filled(job.source.argv, values)]
    if takes_local_rank_as_a_word(job.source):
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
        raise refusal("it trains in a process that it forked", mend="start no ranks in the script, a trial does")
    if session.engine is None:
        raise refusal(
            "it ended and never called deepspeed.initialize",
            mend="a trial is a run of the script that trains: is an argument missing after --, or --kind wrong?",
        )
    wanted = job.steps.warmup + 1
    whole = len(session.clock.times)
    if whole < wanted:
        raise refusal(
            f"it ended after {whole} optimizer step{'s' * (whole != 1)} of micro batch {job.micro_batch}, "
            f"and a trial needs {wanted} at least",
            mend="give it more data, more epochs or a larger max_steps after --",
        )
