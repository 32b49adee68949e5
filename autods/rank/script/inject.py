"""What a script gets from autods in a rank, whatever it is run for.

It gets DeepSpeed's config over its own, the batch sizes, a launcher's environment and command line, and its phases are
reported. The policy of a trial or of a run is passed in, and says what follows at each event. The adapters know the
libraries: DeepSpeed's is always there, a trainer's calls `deepspeed.initialize` for the script.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...config.trainers import find_library
from ...types import WorkloadSource
from ...workload.protocol import WorkloadError
from ...workload.script_source import fill_placeholders, has_local_rank_parameter
from ..job import RankJob
from ..patching import when_imported
from . import surroundings
from .engine_config import EngineConfig
from .policy import FORKED, Injection, Policy
from .user_errors import cause_of_exit, explain


def run_script(job: RankJob, slot: int, store: socket.socket | None, policy: Policy) -> None:
    """Run the script as `__main__` until it ends, or the policy ends it.

    Raises the error that ended the script too early; WorkloadError if it can be explained in the user's terms.
    """
    injection = Injection(job=job, slot=slot, policy=policy, config=EngineConfig(job))
    surroundings.install(job, slot, store, injection.stand_ins)
    try:
        install_adapters(injection)
    except ImportError as error:  # of the library that the kind of the script names
        raise explain(error, job.device) from error
    policy.prepare(injection)
    when_imported("torch.optim.optimizer", policy.refuse_other_training)
    prepare_process(job, slot, injection.config.file)
    policy.observer("build", 0)
    pid = os.getpid()
    failure: BaseException | None = None
    try:
        run_as_main(job.source)
    except policy.ends:
        pass
    except BaseException as error:
        if os.getpid() != pid:
            _end_child(job, error)
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            failure = cause_of_exit(error, policy.failure)
    if os.getpid() != pid:
        os._exit(0)  # a forked child that ran on to the end of the script
    failure = failure or policy.failure
    if failure is not None:
        explained = explain(failure, job.device, writes_confined=policy.writes_confined, kind=job.source.script_kind)
        if explained is failure:
            raise failure
        raise explained from failure
    policy.conclude()
    policy.observer("done", policy.step)


def install_adapters(injection: Injection) -> None:
    """Install DeepSpeed's adapter, and that of the trainer which the script uses, for the rest of this process."""
    library = find_library(injection.job.source)
    for name in dict.fromkeys(("deepspeed", "deepspeed" if library is None else library.name)):
        importlib.import_module(f".adapters.{name}", __package__).install(injection)


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


def _end_child(job: RankJob, error: BaseException) -> NoReturn:
    """End a child that the script forked. Its error goes to the log, and to the parent if the child tried to train."""
    if isinstance(error, WorkloadError):
        Path(job.scratch, FORKED).touch()
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
