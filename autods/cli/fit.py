"""`autods fit`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..requests import FitRequest
from .ending import Call, end_with_error, show_result
from .options import AS_JSON, MODULE, QUIET, make_command

if TYPE_CHECKING:
    from ..config.settings import Settings
    from ..events import Listener
    from ..types import Trial

EPILOG = """
Examples:

autods fit model.py --gpus 8

autods fit model.py --gpus 8 --gpu-memory 16GiB --global-batch 64 --config quick

autods fit model.py --gpus 8 --stop first-fit      the first rung that fits is enough

autods fit examples/gpt.py --device cpu --gpus 2 --gpu-memory 416MiB      without a GPU

autods fit model.py --gpus 8 --nodes 2 --address auto      on two nodes of a Ray cluster

autods fit train.py --gpus 8 -- --deepspeed_config {ds_config} --micro-batch {micro_batch_size}      your own script

Exit codes: 0 done, 1 nothing fits, 2 wrong input, 3 broken environment, 130 interrupted (the same command goes on).
"""


def run_fit(call: Call, request: FitRequest, *, as_json: bool, quiet: bool) -> int:
    """Run the fit, show how it ended, and return the exit code."""
    out = Path(request.out) if request.out else None
    try:
        from ..api import FIT
        from ..events import Note

        command = call.fit or FIT
        settings = command.resolve(request)
        out = settings.out
        with _show_progress(quiet) as listen:
            listen(Note(text=_describe(settings)))
            report = command.run(settings, listen)
        show_result(report, as_json=as_json)
        return 0 if report.status == "fit" else 1
    except (Exception, KeyboardInterrupt) as error:
        return end_with_error(error, call=call, out=out, as_json=as_json)


fit_command = make_command(FitRequest, run_fit, MODULE, AS_JSON, QUIET)


def _show_progress(quiet: bool) -> AbstractContextManager[Listener]:
    from ..report.live import Progress

    return nullcontext(lambda event: None) if quiet else Progress(label=DifferenceFromFirst())


class DifferenceFromFirst:
    """Labels a trial by its differences from the first: 'without checkpointing', 'recomputing', 'in fp16'.

    The walk comes first, and recomputes activations where the model can, so most labels are empty.
    """

    def __init__(self) -> None:
        self._recomputes: bool | None = None

    def __call__(self, trial: Trial) -> str:
        from ..tuner.candidates import unusual_knobs

        if self._recomputes is None:
            self._recomputes = trial.knobs.checkpointing
        return unusual_knobs(trial.knobs, recomputes=self._recomputes)


def _describe(settings: Settings) -> str:
    """The question and the folder of the answer, shown before anything slow begins."""
    from ..report.text import format_ranks
    from ..units import format_bytes

    machine = f"{format_ranks(settings.gpus, settings.device)} × {format_bytes(settings.device_bytes)}"
    if settings.nodes > 1:
        machine += f" on {settings.nodes} nodes"
    return f"{settings.source.name} on {machine}, {settings.profile.name} config → {settings.out}"
