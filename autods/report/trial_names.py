"""What people call a config and a trial: the same words on a terminal, in Markdown and on a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..config.checkpointing import PARTIAL, find_state
from ..config.deepspeed import HALVES, PINS
from ..types import Knobs, Record, Scalar, Trial
from .text import format_outcome, format_seconds, format_value

LabelTrial = Callable[[Trial], str]  # what tells a trial from others of its rung and batch; '' for a usual one


def name_trial(trial: Trial, label: str = "") -> str:
    """'zero3, micro batch 4 × 2 (walk), without checkpointing'. `label` says what is unusual about the trial."""
    steps = f" × {trial.knobs.accumulation}" if trial.knobs.accumulation > 1 else ""
    limit = "" if trial.limited else " without limit"
    limit = " without the headroom" if trial.knobs.keeps_headroom else limit
    batch = f"micro batch {trial.knobs.micro_batch}{steps} ({trial.purpose}{limit})"
    return ", ".join(filter(None, (trial.rung, batch, label)))


def format_record(record: Record, *, replayed: bool = False, label: str = "", counts: bool = True) -> str:
    """A finished trial as one plain line. `label` has the conditions of a probe's trial."""
    end = "from the journal" if replayed else format_seconds(record.seconds)
    outcome = format_outcome(record.outcome, counts=counts)
    return f"trial {record.id}: {name_trial(record.trial, label)}: {outcome} [{end}]"


def config_name(rung: str, knobs: Knobs, *, recomputes: bool) -> str:
    """The rung and its unusual knobs, for people. `recomputes`: the model supports gradient checkpointing."""
    return f"{rung} {unusual_knobs(knobs, recomputes=recomputes)}".rstrip()


def unusual_knobs(knobs: Knobs, *, recomputes: bool) -> str:
    """'in fp16', 'without checkpointing' where the model `recomputes` otherwise, several or nothing."""
    words = []
    if any(f"{half}.enabled" in knobs.settings for half in HALVES):
        words.append(f"in {_find_precision(knobs)}")
    if recomputes and not knobs.checkpointing:
        words.append("without checkpointing")
    state = find_state(knobs)
    extras = ["inputs on the host"] if state == "offload" else [f"checkpointing {state}"] if state in PARTIAL else []
    extras += ["expandable segments"] if knobs.expandable else []
    return " ".join([*words, *([f"with {' and '.join(extras)}"] if extras else [])])


def name_conditions(axes: Mapping[str, Sequence[object]], trial: Trial) -> str:
    """'pin_memory off, NCCL_P2P_DISABLE 1': a probe's trial on these axes, without values that all cells share.

    Axes that have no effect on the trial are left out; so are rung and batch, which every line has.
    """
    settings = trial.knobs.settings
    values: dict[str, Scalar | None] = {
        **settings,
        **trial.conditions,
        "checkpointing": find_state(trial.knobs),
        "precision": _find_precision(trial.knobs),
        "pin_memory": next((settings[key] for key in PINS if key in settings), None),
    }
    varied = [name for name, tried in axes.items() if len(tried) > 1]
    shown = [name for name in varied if name not in ("rung", "micro_batch", "accumulation")]
    known = {name: value for name in shown if (value := values.get(name)) is not None}
    return ", ".join(f"{name.rpartition('.')[2]} {format_value(value)}" for name, value in known.items())


def _find_precision(knobs: Knobs) -> str:
    return next((half for half in HALVES if knobs.settings.get(f"{half}.enabled")), "fp32")
