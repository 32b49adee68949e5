"""A finding, an exit code, or nothing → the diagnosis that a person and a program read."""

# ruff: noqa: E501  (tables of patterns)

from __future__ import annotations

import re
from collections.abc import Sequence

from .diagnosis import Diagnosis
from .exits import meaning_of, normal
from .messages import Message
from .shortage import shortage_in
from .story import Finding, Story

_EVIDENCE_LINES = 4
_EVIDENCE_CHARS = 400
_PHASES = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"in (?:save_checkpoint|save_16bit_model|_save_checkpoint|save_model|save_pretrained)|torch/serialization.*in save", "checkpoint"),
        (r"in (?:evaluate|validation_step|evaluation_loop|prediction_step|predict)\b", "evaluation"),
        (r"in (?:_worker_loop|fetch|__getitem__|collate\w*|_next_data|_try_get_data|default_collate)\b", "data"),
        (r"in (?:backward|_engine_run_backward|run_backward|loss_backward)\b", "backward"),
        (r"in (?:optimizer_step|_optimizer_step|_take_model_step|_step|clip_grad\w*|step_post_hook|_multi_tensor_adamw?|_initialize_state)\b", "step"),
        (r"in (?:from_pretrained|load_state_dict|_load_pretrained_model|load_checkpoint|build_model|load_model)\b", "load"),
        (r"in (?:initialize|_configure_\w+|_configure_zero_optimizer|initialize_optimizer_states|init_process_group|_prepare_deepspeed|prepare|_broadcast_model|setup)\b", "init"),
        (r"in (?:forward|_call_impl|_wrapped_call_impl|compute_loss|training_step)\b", "forward"),
        (r"in step\b", "step"),
    )
)  # fmt: skip


def diagnosis_of(
    one: Finding, sure: float, same: Sequence[Finding], *, rank: int | None = None, advice: str | None = None,
    as_pressure: bool = False,
) -> Diagnosis:  # fmt: skip
    row, message = one.row, one.message
    lines = list(dict.fromkeys(line for found in same for line in _telling(found)))[:_EVIDENCE_LINES]
    shortage = shortage_in(message.text)
    notes = shortage.notes() if row.tier == "device" else ()
    said = advice or row.advice
    if notes:
        said = f"{notes[0][0].upper()}{notes[0][1:]}. Then: {said}" if shortage.fragmented else f"{said} ({notes[0]})"
    return Diagnosis(
        kind="memory_pressure" if as_pressure else row.kind,
        tier=row.tier,
        rank=rank,
        phase=_phase(message),
        confidence=round(sure, 2),
        evidence=tuple(lines),
        places=(f"{message.file}:{message.number}",) if message.file else (f"line {message.number}",),
        action="leaner_rung" if as_pressure else row.action,
        advice=said,
        notes=notes,
        signature=f"{row.file}/{row.name}",
    )


def pressure_advice(one: Finding) -> str:
    if one.row.weight == "pressure":
        return one.row.advice
    return "memory ran out on the way and the run went on: leave headroom with a smaller micro batch or a leaner rung"


def _telling(one: Finding) -> list[str]:
    """The lines of the message that say it: its first, and the one that the row matched."""
    lines = [line.strip() for line in one.message.text.splitlines() if line.strip()]
    low = [line.lower() for line in lines]
    hit = next(
        (line for line, text in zip(lines, low, strict=True) if any(words in text for words in one.row.says)), None
    )
    return [line[:_EVIDENCE_CHARS] for line in dict.fromkeys(filter(None, (lines[0] if lines else None, hit)))]


def _phase(message: Message) -> str | None:
    for frame in reversed(message.frames):
        for pattern, phase in _PHASES:
            if pattern.search(frame):
                return phase
    return None


def by_exit(code: int, story: Story) -> Diagnosis:
    meaning = meaning_of(code)
    if normal(code) == -9 and (hints := [one for one in story.findings if one.row.weight == "hint"]):
        return diagnosis_of(hints[-1], 0.7, hints, rank=story.root_rank)
    end = next((end for end in story.exits if normal(end.code) == normal(code)), None)
    rank = story.root_rank if story.root_rank is not None else end.rank if end is not None else None
    said = end.line if end is not None else f"exit code {code}"
    last = [line for lines in story.last.values() for line in lines[-1:]]
    return Diagnosis(
        kind=meaning.kind,
        tier=meaning.tier,
        rank=rank,
        confidence=meaning.confidence,
        evidence=tuple(dict.fromkeys(line[:_EVIDENCE_CHARS] for line in (said, *last) if line))[:_EVIDENCE_LINES],
        action=meaning.action,
        advice=f"{meaning.said}: {meaning.advice}",
        signature=f"exit code {normal(code)}",
    )


def nothing_of(story: Story, exit_code: int | None, done: bool) -> Diagnosis:
    if not story.text:
        advice = "this is not text: give the log itself"
        return Diagnosis(kind="unknown", confidence=0.1, action="nothing", advice=advice)
    if not story.bytes and exit_code is None:
        advice = "the log is empty; if the run died, its exit code says more: --exit-code"
        return Diagnosis(kind="none", confidence=0.2, action="nothing", advice=advice)
    sure = 0.95 if exit_code == 0 or done else 0.6
    advice = (
        "no failure is seen" if sure > 0.9 else "no failure is seen; if the run died all the same, give --exit-code"
    )
    return Diagnosis(kind="none", confidence=sure, action="nothing", advice=advice)
