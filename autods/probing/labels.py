"""What distinguishes a trial of a probe from the others, in a few words."""

from __future__ import annotations

from ..report.probe_columns import of_value
from ..values import Trial
from .axes import Value
from .keys import PINS
from .question import Question

_SHOWN = ("rung", "micro_batch", "accumulation")  # a line of progress has these anyway


def label_of(question: Question, trial: Trial) -> str:
    """'pin_memory off, env.NCCL_P2P_DISABLE 1'; what is the same in all cells is left out."""
    named = [axis.name for axis in question.axes if len(axis.values) > 1 and axis.name not in _SHOWN]
    said = [(name, _value_in(trial, name)) for name in named]
    return ", ".join(f"{name.rpartition('.')[2]} {of_value(value)}" for name, value in said if value is not None)


def _value_in(trial: Trial, name: str) -> Value:
    """The axis' value; None where it means nothing to the trial."""
    settings = trial.knobs.settings
    if name == "checkpointing":
        return trial.knobs.checkpointing
    if name == "precision":
        return next((half for half in ("bf16", "fp16") if settings.get(f"{half}.enabled")), "fp32")
    if name == "pin_memory":
        return next((settings[key] for key in PINS if key in settings), None)
    return trial.conditions.get(name, settings.get(name))
