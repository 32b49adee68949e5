"""Run an unmodified training script as a trial."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...types import WorkloadSource
from ...workload.protocol import WorkloadError
from ...workload.script_source import fill_placeholders, has_local_rank_parameter
from ..job import RankJob
from ..patching import declare
from ..result import ScriptEnd
from . import cpu_ranks, engine_hooks, sandbox
from .session import Enough, Session
from .user_errors import cause_of_exit, explain, script_error

_LISTED_FILES = 20
_EXIT = declare("os._exit", "a script that has trained enough may leave as it likes")
_FORKED = "forked"  # a file in the scratch folder: training was tried in a forked process


def run(
    job: RankJob,
    slot: int,
    observer: Any,
    store: socket.socket | None,
    leave: Callable[[ScriptEnd | BaseException], NoReturn],
    make_session: Callable[..., Session] = Session,
) -> ScriptEnd:
    """Run the script and return its facts after a survey, else its measurements.

    `leave` ends this process with a result or an error if the script ignores the exception that should end it.
    `make_session` replaces the session; a forecast uses it.
    Raises the error that ended the script too early; WorkloadError if it can be explained in the user's terms.
    """
    session = make_session(job=job, slot=slot, observer=observer, leave=leave)
    cpu_ranks.install(job, slot, store, session.stand_ins)
    try:
        engine_hooks.install(session)
    except ImportError as error:  # the library that the kind of the script names
        raise explain(error, job.device) from error
    session.batches.watch_loaders()
    pid = os.getpid()
    overlay = sandbox.install(session)
    prepare_process(job, slot, session.config.file)
    observer("build", 0)
    failure: BaseException | None = None

    def exit_with_result(code: int) -> NoReturn:
        with _EXIT.installed(exit_now):
            if session.ended and os.getpid() == pid:
                leave(session.result())
            os._exit(code)

    exit_now = os._exit
    try:
        with _EXIT.installed(exit_with_result):
            run_as_main(job.source)
    except Enough:
        pass
    except BaseException as error:
        if os.getpid() != pid:
            _end_child(session, error)
        if not session.ended and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            failure = cause_of_exit(error, session.failure)
    if os.getpid() != pid:
        os._exit(0)  # a forked child that ran on to the end of the script
    failure = failure or session.failure
    if failure is not None:
        explained = explain(failure, job.device, writes_confined=session.writes_confined)
        if explained is failure:
            raise failure
        raise explained from failure
    if overlay.written:
        print(f"autods: kept out of your folders: {', '.join(list(overlay.written)[:_LISTED_FILES])}", flush=True)
    if not session.ended:
        _check_measured_enough(session)
        session.finish_exam()
    observer("done", session.steps)
    return session.result()


def run_as_main(source: WorkloadSource) -> None:
    """Run the script as `python FILE` or `python -m MODULE` does."""
    if source.module is None:
        runpy.run_path(source.path, run_name="__main__")
    else:
        runpy.run_module(source.module, run_name="__main__", alter_sys=True)


def prepare_process(job: RankJob, slot: int, ds_config: Mapping[str, Any]) -> None:
    """Set the working directory, the arguments and the module path as a launcher does."""
    config = Path(job.scratch) / f"ds_config.rank{job.local_ranks[slot]}.json"
    config.write_text(json.dumps(ds_config, indent=2))
    values = {
        "ds_config": config,
        "micro_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "train_batch_size": job.train_batch,
    }
    os.chdir(job.source.folder or Path(job.source.path).parent)
    sys.argv = [job.source.path, *fill_placeholders(job.source.argv, values)]
    if has_local_rank_parameter(job.source):
        sys.argv.append(f"--local_rank={slot}")
    sys.path.insert(0, os.getcwd() if job.source.module else str(Path(job.source.path).parent))
    sys.dont_write_bytecode = True


def _end_child(session: Session, error: BaseException) -> NoReturn:
    """End a child that the script forked. Its error goes to the log, and to the parent if the child tried to train."""
    if isinstance(error, WorkloadError):
        Path(session.job.scratch, _FORKED).touch()
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _check_measured_enough(session: Session) -> None:
    """Raises WorkloadError when the script ended by itself before the trial had enough steps."""
    job, steps = session.job, len(session.recorder.times)
    if Path(job.scratch, _FORKED).exists():
        raise script_error(
            "it trains in a process that it forked", hint="start no ranks in the script: a trial starts them"
        )
    if session.engine is None:
        raise script_error(
            "it ended and never called deepspeed.initialize",
            hint="is an argument missing after --? A script without DeepSpeed needs engine, *_ = deepspeed.initialize("
            "model=model, optimizer=optimizer, config=…), then engine.backward(loss) and engine.step()",
        )
    if steps <= job.steps.warmup:
        raise script_error(
            f"it ended after {steps} optimizer step{'s' * (steps != 1)} of micro batch {job.micro_batch}, "
            f"and a trial needs at least {job.steps.warmup + 1}",
            hint="give it more data, more epochs or a larger max_steps after --",
        )
