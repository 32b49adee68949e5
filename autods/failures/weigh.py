"""All that a run's logs say → one diagnosis: the cause, not the loudest line.

A row that names a cause beats an unnamed exception, that beats what only noticed another rank, that beats a bare exit
code; among equals the first in time. What the run survived is no cause: it went on, or it ended well.
"""

# ruff: noqa: E501  (tables of patterns)

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .diagnosis import Diagnosis
from .exits import Exit, meaning_of, normal
from .messages import Message
from .shortage import shortage_in
from .signatures import Signature

_RESUMED = 3  # so much progress after it says that it was survived: other ranks show a step or two more at most
_EVIDENCE_LINES = 4
_EVIDENCE_CHARS = 400
_ORDER = {"decisive": 0, "cause": 1, "likely": 2}
_SILENT = (-9, -11, -7, -4, -8)  # signals that leave no word; a watchdog ends its own process by −6

_RANK_IN_TEXT = re.compile(
    r"\b(?:global[_ ]?rank|rank)\s?[:=#]?\s?(\d+)\b|\[rank(\d+)\]|task (\d+):|RankID:(\d+)", re.IGNORECASE
)
_RANK_BEFORE = re.compile(r"^\[Rank (\d+)\]|on \[Rank (\d+)\]", re.IGNORECASE)
_RANK_OF_NCCL = re.compile(r"^\S+:\d+:\d+ \[(\d+)\] ")
_RANK_IN_FILE = re.compile(
    r"(?:rank|worker|trainer|proc(?:ess)?|task|local_rank)[_.-]?(\d+)(?!\d)|(?:attempt_\d+|none_\w+|default_\w+)/(\d+)/"
    r"|(?:^|/)(\d+)/(?:std(?:err|out)|error|log)|slurm-\d+[._](\d+)|[._-](\d+)\.(?:log|out|err|txt)$|^(\d+)\.(?:log|out|err|txt)$"
    r"|std(?:err|out)[._-](\d+)|log\.(\d+)$",
    re.IGNORECASE,
)
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


@dataclass(slots=True)
class Finding:
    """A message and the row that it matched."""

    row: Signature
    message: Message
    rank: int | None


@dataclass(slots=True)
class Story:
    """What was read. progress: per file, at its end. root_rank: whom torchrun saw fail first. last: of each file."""

    findings: list[Finding] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    first_exit: Exit | None = None
    root_rank: int | None = None
    named_rank: int | None = None  # an error line without a cause names it
    progress: dict[str, int] = field(default_factory=dict)
    last: dict[str, list[str]] = field(default_factory=dict)
    bytes: int = 0
    files: int = 1
    text: bool = True


def finding_of(row: Signature, message: Message, files: int) -> Finding:
    """With the rank that the prefix, the text or the file's name tells."""
    rank = message.prefix.rank
    if rank is None and row.weight != "secondary" and (found := _RANK_BEFORE.search(message.text)):
        rank = _number(found)
    if rank is None:
        found = _RANK_IN_TEXT.search(message.text[:600])
        rank = _number(found) if found and row.weight in ("cause", "likely") else None
    if rank is None and (found := _RANK_OF_NCCL.search(message.text)):
        rank = _number(found)
    if rank is None and (found := _RANK_IN_FILE.search(message.file)) and files > 1:
        rank = _number(found)
    return Finding(row, message, rank)


def rank_of_file(name: str) -> int | None:
    """The rank that a log's name tells: 'rank_3.log', 'attempt_0/3/stderr.log'."""
    found = _RANK_IN_FILE.search(name)
    return _number(found) if found else None


def weigh(story: Story, exit_code: int | None = None) -> Diagnosis:
    """The diagnosis. exit_code: of the whole run, as subprocess or a shell says it, where it is known."""
    ended_well = exit_code == 0 or (exit_code is None and _done(story))
    alive = [one for one in story.findings if not ended_well and not _survived(one, story)]
    causes = [one for one in alive if one.row.weight in _ORDER]
    if causes:
        return _caused(_first(causes, story), story, causes)
    if second := [one for one in alive if one.row.weight == "secondary"]:
        if (end := story.first_exit) is not None and end.code in _SILENT:
            return _by_exit(end.code, story)
        return _secondary(second[0], story)
    weak = [one for one in alive if one.row.weight == "weak"]
    if weak and (story.first_exit is None or story.first_exit.code not in _SILENT):
        return _caused(_first(weak, story), story, weak)
    if (code := _exit_to_go_by(exit_code, story, ended_well)) is not None:
        return _by_exit(code, story)
    if pressed := [one for one in story.findings if _presses(one)]:
        return _diagnosis(pressed[0], 0.8, pressed, advice=_pressure_advice(pressed[0]), as_pressure=True)
    return _none(story, exit_code)


def _exit_to_go_by(exit_code: int | None, story: Story, ended_well: bool) -> int | None:
    """A launcher's own 1 says less than the signal that it reports of a rank."""
    told = story.first_exit.code if story.first_exit is not None and not ended_well else None
    if told is not None and (told < 0 or exit_code is None):
        return told
    return exit_code or None


def _first(causes: Sequence[Finding], story: Story) -> Finding:
    def order(one: Finding) -> tuple[int, bool, str, int]:
        likely = _ORDER.get(one.row.weight, 3)
        not_root = story.root_rank is not None and one.rank is not None and one.rank != story.root_rank
        return (
            likely,
            not_root and story.files == 1,
            one.message.prefix.time if story.files > 1 else "",
            one.message.order,
        )

    return min(causes, key=order)


def _survived(one: Finding, story: Story) -> bool:
    """The run trained on after it."""
    if one.row.weight == "done" or one.row.weight == "benign":
        return True
    if one.message.ignored:
        return True
    return story.progress.get(one.message.file, 0) - one.message.progress >= _RESUMED


def _done(story: Story) -> bool:
    """Something says that the run ended well, and nothing that it failed stands after it."""
    done = [one.message for one in story.findings if one.row.weight == "done"]
    if not done or (story.first_exit is not None and story.first_exit.code != 0):
        return False
    last = done[-1]
    return not any(
        one.row.weight in _ORDER and one.message.file == last.file and one.message.order > last.order
        for one in story.findings
    )


def _presses(one: Finding) -> bool:
    """Memory was short on the way: a row says so, or a full device was survived."""
    return one.row.weight == "pressure" or (
        one.row.kind == "out_of_memory" and one.row.tier == "device" and one.row.weight in _ORDER
    )


def _caused(cause: Finding, story: Story, causes: Sequence[Finding]) -> Diagnosis:
    sure = {"decisive": 0.95, "cause": 0.95, "likely": 0.6, "weak": 0.4}[cause.row.weight]
    if cause.message.manner == "stated":
        sure -= 0.05
    if cause.message.manner == "mentioned":
        sure -= 0.15
    same = [one for one in causes if one.row is cause.row]
    rank = cause.rank
    if cause.row.weight == "decisive" and (told := _rank_of_exit(story)) is not None:
        rank = told  # the line is the node's, whoever printed it
    if rank is None and cause.row.kind != "none":
        rank = next(
            (found for found in (story.root_rank, story.named_rank, _rank_of_exit(story)) if found is not None), None
        )
    return _diagnosis(cause, sure, same, rank=rank)


def _rank_of_exit(story: Story) -> int | None:
    return story.first_exit.rank if story.first_exit is not None else None


def _diagnosis(
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
        rank=rank if rank is not None else one.rank,
        phase=_phase(message),
        confidence=round(sure, 2),
        evidence=tuple(lines),
        places=(f"{message.file}:{message.number}",) if message.file else (f"line {message.number}",),
        action="leaner_rung" if as_pressure else row.action,
        advice=said,
        notes=notes,
        signature=f"{row.file}/{row.name}",
    )


def _pressure_advice(one: Finding) -> str:
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


def _secondary(one: Finding, story: Story) -> Diagnosis:
    return (
        _diagnosis(one, 0.7, [one], rank=None)
        if one.rank is None
        else _without_rank(_diagnosis(one, 0.7, [one]), story)
    )


def _without_rank(said: Diagnosis, story: Story) -> Diagnosis:
    """The rank that noticed is not the one that failed."""
    from dataclasses import replace

    return replace(said, rank=story.root_rank)


def _by_exit(code: int, story: Story) -> Diagnosis:
    meaning = meaning_of(code)
    if normal(code) == -9 and (hints := [one for one in story.findings if one.row.weight == "hint"]):
        return _diagnosis(hints[-1], 0.7, hints, rank=story.root_rank)
    end = next((end for end in story.exits if normal(end.code) == normal(code)), None)
    rank = end.rank if end is not None and end.rank is not None else story.root_rank
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


def _none(story: Story, exit_code: int | None) -> Diagnosis:
    if not story.text:
        advice = "this is not text: give the log itself"
        return Diagnosis(kind="unknown", confidence=0.1, action="nothing", advice=advice)
    if not story.bytes and exit_code is None:
        advice = "the log is empty; if the run died, its exit code says more: --exit-code"
        return Diagnosis(kind="none", confidence=0.2, action="nothing", advice=advice)
    sure = 0.95 if exit_code == 0 or _done(story) else 0.6
    advice = (
        "no failure is seen" if sure > 0.9 else "no failure is seen; if the run died all the same, give --exit-code"
    )
    return Diagnosis(kind="none", confidence=sure, action="nothing", advice=advice)


def _number(found: re.Match[str]) -> int:
    return int(next(group for group in found.groups() if group is not None))
