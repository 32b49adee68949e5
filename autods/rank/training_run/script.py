"""Run a training script as it is: with its real files, in the user's folder, with the order's DeepSpeed config."""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ...config.deepspeed import merge, strip_rung_keys, to_lightning_config, to_trainer_config
from ...types import ScriptKind
from ..job import RankJob
from ..script import cpu_ranks
from ..script.engine_hooks import INITIALIZE, find_config, set_config
from ..script.run import prepare_process, run_as_main
from ..script.user_errors import cause_of_exit, explain
from . import hf_trainer
from .session import NO_SESSION, Stopped, has_begun

# The config file of a script whose library calls the engine.
_CONVERSIONS: Mapping[ScriptKind | None, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "hf_trainer": to_trainer_config,
    "accelerate": to_trainer_config,
    "lightning": to_lightning_config,
}


def run_script(job: RankJob, slot: int, store: socket.socket | None) -> None:
    """Run the job's script as `__main__` until it ends. Raises the error that ended it, explained where that helps."""
    stand_ins: list[str] = []
    cpu_ranks.install(job, slot, store, stand_ins)
    convert = _CONVERSIONS.get(job.source.script_kind)
    if convert is None:
        INITIALIZE.wrap(_initialize, job, everywhere=True)
    if job.source.script_kind == "hf_trainer":
        hf_trainer.install(job)
    prepare_process(job, slot, convert(job.ds_config) if convert else job.ds_config)
    try:
        run_as_main(job.source)
    except BaseException as error:
        if isinstance(error, Stopped) or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        failure = cause_of_exit(error, None)
        explained = explain(failure, job.device)
        if explained is failure:
            raise failure from None
        raise explained from failure


def _initialize(job: RankJob, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Make the engine with the run's settings over the script's own config, as the trials did."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    config, _ = find_config(arguments)
    has_optimizer = arguments["optimizer"] is not None
    trains = has_optimizer or arguments["model_parameters"] or "optimizer" in (config or {})
    if config is not None and trains:  # else the engine serves a frozen model, or DeepSpeed reports the problem
        completed = merge(strip_rung_keys(config), job.ds_config)
        if has_optimizer:
            completed.pop("optimizer", None)
        set_config(arguments, completed)
    result = original(*bound.args, **bound.kwargs)
    if trains:
        report_missing_session(result[0])
    return result


def report_missing_session(engine: Any) -> None:
    """Let the first step of an engine say that the script has made no session until then."""
    step = engine.step

    def first_step(*args: Any, **kwargs: Any) -> Any:
        if engine.step is first_step:  # a session may have wrapped it
            engine.step = step
        if not has_begun() and os.environ.get("RANK", "0") == "0":
            print(f"autods: warning: {NO_SESSION}", file=sys.stderr, flush=True)
        return step(*args, **kwargs)

    engine.step = first_step
