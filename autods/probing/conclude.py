"""The report of a probe: its cells, beside what was asked and of which machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ..checks import precision_of
from ..hardware import look, versions
from ..report.probe_result import CellResult, ProbeReport
from ..values import Record
from .notes import notes_of
from .question import Question


def by_tokens(question: Question) -> bool:
    """Where samples differ in length, tokens a second is what can be compared."""
    return any(axis.name in ("seq_len", "build_batch.seq_len", "target_len") for axis in question.axes)


def concluded(
    question: Question, cells: tuple[CellResult, ...], reference: int | None, records: Sequence[Record], seconds: float
) -> ProbeReport:
    """reference: the number of the cell that the others are compared with."""
    settings = question.settings
    return ProbeReport(
        status="done" if any(cell.status == "fit" for cell in cells) else "nothing_fits",
        axes={axis.name: axis.values for axis in question.axes},
        cells=cells,
        compared=None if reference is None else (reference, "tokens" if by_tokens(question) else "samples"),
        notes=notes_of(question),
        trials=tuple(records),
        question={
            "workload": settings.source.name,
            "gpus": settings.gpus,
            "nodes": settings.nodes,
            "device": settings.device,
            "device_bytes": settings.device_bytes,
            "global_batch": settings.global_batch,
            "precision": "its own precision" if settings.source.kind == "script" else precision_of(settings.base),
            "repeats": question.repeats,
            "steps": asdict(question.steps),
            "capacity": question.capacity,
            "parallel_trials": question.parallel,
            "forecast_only": question.forecast_only,
            "machine": None if question.machine is None else question.machine.name,
        },
        versions=versions(),
        hardware=asdict(look()),
        seconds=seconds,
        out=str(settings.out),
    )
