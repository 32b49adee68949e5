"""What ends a fit before its first trial: a workload that cannot be looked at, or a machine that cannot load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import AutodsError, EnvironmentBroken, InputError
from ..events import Listener, Note
from ..failures import input_error
from ..outcomes import Failed, Fit, Outcome
from ..trial.spec import RankJob
from .result import failure_from
from .team import Report


def check_ready(ready: Report, job: RankJob, log: Path, listen: Listener) -> None:
    """ready: what a zygote says when it has loaded everything. job: whose failure it would be.

    Raises InputError where the workload is at fault, EnvironmentBroken where the machine is.
    """
    if "error" in ready:
        failure = failure_from([ready], job)
        assert failure is not None
        raise _unusable(failure, job, log)
    if "died" in ready:
        raise EnvironmentBroken(f"torch and DeepSpeed could not be loaded ({ready['died']})\n  see {log}")
    if ready.get("unfit"):
        # Never a silent fall-back: each trial now pays for its own imports.
        listen(Note(text=f"ranks start as new processes, some 10 s slower a trial: {ready['unfit']}"))


def check_survey(failure: Outcome | None, job: RankJob) -> None:
    """Raises as `check_ready` does."""
    if failure is not None:
        rank = 0 if isinstance(failure, Fit) else max(0, failure.rank)
        raise _unusable(failure, job, Path(job.folder) / f"rank{rank}.log")


def may_want_ranks(reports: Sequence[Report], job: RankJob) -> bool:
    """Whether a script that failed on one rank checks how many there are, as a pipeline of stages does."""
    errors = [(end["record"] or {}).get("error", {}) for report in reports for end in report.get("ends", ())]
    return job.source.kind == "script" and any(
        not error.get("contract") and {"AssertionError", "ValueError", "RuntimeError"} & set(error.get("types", ()))
        for error in errors
    )


def _unusable(failure: Outcome, job: RankJob, log: Path) -> AutodsError:
    where = job.source.path
    if isinstance(failure, Failed):
        if failure.action in ("fix_code", "fix_config"):
            return input_error(failure, where, log)
        return EnvironmentBroken(f"{failure.evidence}\n  {failure.advice} (log: {log})")
    return InputError("the workload does not fit into this machine's memory", where=where)
