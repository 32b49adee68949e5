"""Weigh what was found in the logs, and answer with the root cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .exit_codes import Exit, meaning_of, normal
from .messages import SAYS_SO, Message
from .ranks import Ranks, local_of, nccl_device_of, rank_of
from .reader import Clock
from .rules import Signature
from .values import Diagnosis, shortage_in


@dataclass(slots=True)
class Finding:
    """A message and the row that it matched.

    local: the GPU's index; nccl: the device in NCCL's prefix. when: as its file tells it.
    """

    row: Signature
    message: Message
    rank: int | None
    local: int | None = None
    nccl: int | None = None
    when: Clock | None = None


@dataclass(slots=True)
class Story:
    """What was read. progress: per file, at its end. root_rank: whom torchrun saw fail first. last: of each file."""

    findings: list[Finding] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks)
    first_exit: Exit | None = None
    root_rank: int | None = None
    named_rank: int | None = None  # an error line without a cause names it
    progress: dict[str, int] = field(default_factory=dict)
    last: dict[str, list[str]] = field(default_factory=dict)
    bytes: int = 0
    files: int = 1
    text: bool = True

    def rank(self, one: Finding) -> int | None:
        """Of the process that a finding is about: by its own words, then by its process id, then by its GPU."""
        found = (one.rank, self.ranks.of(one.message), self.ranks.of_device(one.local))
        return next((rank for rank in found if rank is not None), None)


def finding_of(row: Signature, message: Message, files: int, when: Clock | None = None) -> Finding:
    """With the rank and the GPU that the message itself names."""
    rank = rank_of(message, row.weight, files)
    return Finding(row, message, rank, local_of(message), nccl_device_of(message), when)


_KILLED_PROGRAM = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)")
_OURS = re.compile(r"python|^pt_|ray|torchrun|deepspeed|accelerate|train|worker|jupyter|ipykernel", re.IGNORECASE)


def credible(causes: Sequence[Finding], story: Story, exit_code: int | None) -> list[Finding]:
    """The causes that the rest of the log does not speak against."""
    ours = [one for one in causes if not _of_a_stranger(one, causes, story, exit_code)]
    return [one for one in ours if not _in_passing(one, ours)]


def _of_a_stranger(one: Finding, causes: Sequence[Finding], story: Story, exit_code: int | None) -> bool:
    """The kernel killed a program that is none of the run's, and the run ended by an exception of its own."""
    killed = _KILLED_PROGRAM.search(one.message.text) if one.row.weight == "decisive" else None
    if killed is None or _OURS.search(killed[2]) or int(killed[1]) in story.ranks.pids:
        return False
    ends = (exit_code, story.first_exit.code if story.first_exit is not None else None)
    return not any(end is not None and normal(end) == -9 for end in ends) and any(
        other.message.manner == "raised" for other in causes
    )


def _in_passing(one: Finding, causes: Sequence[Finding]) -> bool:
    """A plain line has the words for a full device, and an exception of the script's own ended the process after it."""
    message = one.message
    if one.row.kind != "out_of_memory" or one.row.tier != "device" or one.row.weight == "decisive":
        return False
    if message.manner == "raised" or message.type or message.prefix.level == "error" or SAYS_SO.match(message.text):
        return False
    if "tried to allocate" in message.text.lower():
        return False
    return any(
        other.message.manner == "raised"
        and other.row.kind in ("user_code", "config")
        and other.message.file == message.file
        and other.message.order > message.order
        and (other.rank == one.rank or None in (other.rank, one.rank))
        for other in causes
    )


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


_RESUMED = 3  # so much progress after it says that it was survived: other ranks show a step or two more at most
_ORDER = {"decisive": 0, "cause": 1, "likely": 2}
_SILENT = (-9, -11, -7, -4, -8)  # signals that leave no word; a watchdog ends its own process by −6


def weigh(story: Story, exit_code: int | None = None) -> Diagnosis:
    """The diagnosis. exit_code: of the whole run, as subprocess or a shell says it, where it is known."""
    ended_well = exit_code == 0 or (exit_code is None and _done(story))
    alive = [one for one in story.findings if not ended_well and not _survived(one, story)]
    causes = [one for one in alive if one.row.weight in _ORDER]
    causes = credible(causes, story, exit_code)
    if causes:
        return _caused(_first(causes, story), story, causes)
    if second := [one for one in alive if one.row.weight == "secondary"]:
        if (end := story.first_exit) is not None and end.code in _SILENT:
            return by_exit(end.code, story)
        return _secondary(second[0], story)
    weak = [one for one in alive if one.row.weight == "weak"]
    if weak and (story.first_exit is None or story.first_exit.code not in _SILENT):
        return _caused(_first(weak, story), story, weak)
    if (code := _exit_to_go_by(exit_code, story, ended_well)) is not None:
        return by_exit(code, story)
    if pressed := [one for one in story.findings if _presses(one)]:
        return diagnosis_of(pressed[0], 0.8, pressed, advice=pressure_advice(pressed[0]), as_pressure=True)
    return nothing_of(story, exit_code, _done(story))


def _exit_to_go_by(exit_code: int | None, story: Story, ended_well: bool) -> int | None:
    """A launcher's own 1 says less than the signal that it reports of a rank."""
    told = story.first_exit.code if story.first_exit is not None and not ended_well else None
    if told is not None and (told < 0 or exit_code is None):
        return told
    return exit_code or None


def _first(causes: Sequence[Finding], story: Story) -> Finding:
    """The strongest evidence; of that the first in time: by the clock where files are compared, else by place."""
    best = min(_ORDER.get(one.row.weight, 3) for one in causes)
    equal = [one for one in causes if _ORDER.get(one.row.weight, 3) == best]
    kinds = {one.when[0] if one.when else None for one in equal}
    timed = story.files > 1 and len(kinds) == 1 and None not in kinds

    def order(one: Finding) -> tuple[bool, bool, float, int]:
        rank = story.rank(one)
        not_root = story.root_rank is not None and rank is not None and rank != story.root_rank
        in_passing = one.message.manner == "mentioned" and best > 0
        return in_passing, not_root and story.files == 1, one.when[1] if timed and one.when else 0.0, one.message.order

    return min(equal, key=order)


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
    return diagnosis_of(cause, sure, same, rank=_rank(cause, story, same))


def _rank(cause: Finding, story: Story, same: Sequence[Finding]) -> int | None:
    """Whose failure it is. A line of the node (the kernel's, a scheduler's) is whoever's process it names."""
    if cause.row.kind == "none":
        return cause.rank
    told = (story.root_rank, _rank_of_exit(story))
    if cause.row.weight == "decisive":
        named = story.ranks.of(cause.message)
        found: tuple[int | None, ...] = (
            (named, *told, cause.rank, story.named_rank)
            if cause.rank is None or not story.files > 1
            else (named, cause.rank, *told)
        )
    else:
        others = {one.rank for one in same if one.rank is not None}
        alone = others.pop() if len(others) == 1 else None
        found = (
            cause.rank,
            story.ranks.of(cause.message),
            alone,
            story.root_rank,
            story.named_rank,
            story.ranks.of_device(cause.local),
            cause.nccl,
            _rank_of_exit(story),
        )
    return next((rank for rank in found if rank is not None), None)


def _rank_of_exit(story: Story) -> int | None:
    return story.first_exit.rank if story.first_exit is not None else None


def _secondary(one: Finding, story: Story) -> Diagnosis:
    """The rank that noticed is not the one that failed."""
    return replace(diagnosis_of(one, 0.7, [one]), rank=story.root_rank)
