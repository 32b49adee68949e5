"""Pick the root cause from the findings of all logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .exit_codes import Exit, explain_exit_code, normalize_exit_code
from .messages import REPORTS_FAILURE, Message
from .ranks import Ranks, find_local_gpu, find_nccl_device, find_rank
from .reader import Clock
from .rules import Signature
from .values import Diagnosis, parse_shortage

_EVIDENCE_LINES = 4
_EVIDENCE_CHARS = 400
_RESUMED_STEPS = 3  # of progress after a failure: the run survived it. Other ranks show a step or two more at most
_STRENGTH = {"decisive": 0, "cause": 1, "likely": 2}  # of a row's weight; the smaller is stronger
_CONFIDENCE = {"decisive": 0.95, "cause": 0.95, "likely": 0.6, "weak": 0.4}
_SILENT_SIGNALS = (-9, -11, -7, -4, -8)  # they leave no message; a watchdog ends its own process by −6
_KILLED_PROGRAM = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)")
_TRAINING_PROGRAM = re.compile(
    r"python|^pt_|ray|torchrun|deepspeed|accelerate|train|worker|jupyter|ipykernel", re.IGNORECASE
)


@dataclass(slots=True)
class Finding:
    """A message and the row that it matches.

    The message itself names `rank`. `local` is the index of its GPU, `nccl` the device in NCCL's prefix.
    `when` is the time of its line, as its file writes it.
    """

    row: Signature
    message: Message
    rank: int | None
    local: int | None = None
    nccl: int | None = None
    when: Clock | None = None


@dataclass(slots=True)
class LogSummary:
    """Everything that was read from the logs of one run.

    `progress` maps a file to the training progress at its end, `last` maps it to its last lines.
    `root_rank` is torchrun's root cause. An error line without a cause names `named_rank`.
    `text` tells whether any file was text.
    """

    findings: list[Finding] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks)
    first_exit: Exit | None = None
    root_rank: int | None = None
    named_rank: int | None = None
    progress: dict[str, int] = field(default_factory=dict)
    last: dict[str, list[str]] = field(default_factory=dict)
    bytes: int = 0
    files: int = 1
    text: bool = True

    def rank(self, finding: Finding) -> int | None:
        """The rank that a finding is about: by the message, then by its process id, then by its GPU."""
        ranks = (finding.rank, self.ranks.of(finding.message), self.ranks.of_device(finding.local))
        return next((rank for rank in ranks if rank is not None), None)


def make_finding(row: Signature, message: Message, files: int, when: Clock | None = None) -> Finding:
    """A finding with the rank and the GPU that the message itself names."""
    rank = find_rank(message, row.weight, files)
    return Finding(row, message, rank, find_local_gpu(message), find_nccl_device(message), when)


def pick_root_cause(summary: LogSummary, exit_code: int | None = None) -> Diagnosis:
    """The diagnosis of a run. `exit_code` is the run's, as `subprocess` or a shell reports it, if it is known.

    The strongest evidence wins: a cause in the logs, ranks that only noticed, weak messages, the exit code,
    memory pressure that the run survived.
    """
    ended_well = exit_code == 0 or (exit_code is None and _finished(summary))
    alive = [finding for finding in summary.findings if not ended_well and not _survived(finding, summary)]
    causes = [finding for finding in alive if finding.row.weight in _STRENGTH]
    if causes := _credible(causes, summary, exit_code):
        return _diagnose_cause(_first_cause(causes, summary), summary, causes)
    silent_end = summary.first_exit is not None and summary.first_exit.code in _SILENT_SIGNALS
    if noticed := [finding for finding in alive if finding.row.weight == "secondary"]:
        if silent_end and summary.first_exit is not None:
            return _diagnose_exit(summary.first_exit.code, summary)
        return replace(_diagnosis(noticed[0], 0.7, noticed[:1]), rank=summary.root_rank)
    weak = [finding for finding in alive if finding.row.weight == "weak"]
    if weak and not silent_end:
        return _diagnose_cause(_first_cause(weak, summary), summary, weak)
    if (code := _telling_exit_code(exit_code, summary, ended_well)) is not None:
        return _diagnose_exit(code, summary)
    if pressed := [finding for finding in summary.findings if _shows_pressure(finding)]:
        advice = _pressure_advice(pressed[0])
        return replace(
            _diagnosis(pressed[0], 0.8, pressed, advice=advice), kind="memory_pressure", action="leaner_rung"
        )
    return _no_failure(summary, exit_code)


# Which findings count.


def _survived(finding: Finding, summary: LogSummary) -> bool:
    """Whether the run trained on after it, or it was no failure at all."""
    if finding.row.weight in ("done", "benign") or finding.message.ignored:
        return True
    progress = summary.progress.get(finding.message.file, 0) - finding.message.progress
    return progress >= _RESUMED_STEPS


def _finished(summary: LogSummary) -> bool:
    """Whether a line says that the run ended well, and no failure follows it."""
    done = [finding.message for finding in summary.findings if finding.row.weight == "done"]
    if not done or (summary.first_exit is not None and summary.first_exit.code != 0):
        return False
    last = done[-1]
    return not any(
        finding.row.weight in _STRENGTH and finding.message.file == last.file and finding.message.order > last.order
        for finding in summary.findings
    )


def _credible(causes: Sequence[Finding], summary: LogSummary, exit_code: int | None) -> list[Finding]:
    """The causes that the rest of the log does not contradict."""
    of_run = [cause for cause in causes if not _is_about_other_program(cause, causes, summary, exit_code)]
    return [cause for cause in of_run if not _is_incidental_mention(cause, of_run)]


def _is_about_other_program(
    cause: Finding, causes: Sequence[Finding], summary: LogSummary, exit_code: int | None
) -> bool:
    """The kernel killed a program that does not belong to the run, and the run ended by an exception of its own."""
    killed = _KILLED_PROGRAM.search(cause.message.text) if cause.row.weight == "decisive" else None
    if killed is None or _TRAINING_PROGRAM.search(killed[2]) or int(killed[1]) in summary.ranks.pids:
        return False
    codes = (exit_code, summary.first_exit.code if summary.first_exit is not None else None)
    if any(code is not None and normalize_exit_code(code) == -9 for code in codes):
        return False
    return any(other.message.manner == "raised" for other in causes)


def _is_incidental_mention(cause: Finding, causes: Sequence[Finding]) -> bool:
    """A plain line mentions a full device, and later an exception of the script itself ended the same process."""
    message = cause.message
    if cause.row.kind != "out_of_memory" or cause.row.tier != "device" or cause.row.weight == "decisive":
        return False
    if (
        message.manner == "raised"
        or message.type
        or message.prefix.level == "error"
        or REPORTS_FAILURE.match(message.text)
    ):
        return False
    if "tried to allocate" in message.text.lower():
        return False
    return any(
        other.message.manner == "raised"
        and other.row.kind in ("user_code", "config")
        and other.message.file == message.file
        and other.message.order > message.order
        and (other.rank == cause.rank or None in (other.rank, cause.rank))
        for other in causes
    )


def _first_cause(causes: Sequence[Finding], summary: LogSummary) -> Finding:
    """The first in time of the strongest causes: by the clock where files are compared, else by place."""
    best = min(_STRENGTH.get(cause.row.weight, 3) for cause in causes)
    equal = [cause for cause in causes if _STRENGTH.get(cause.row.weight, 3) == best]
    kinds = {cause.when[0] if cause.when else None for cause in equal}
    timed = summary.files > 1 and len(kinds) == 1 and None not in kinds

    def order(cause: Finding) -> tuple[bool, bool, float, int]:
        rank = summary.rank(cause)
        not_root = summary.root_rank is not None and rank is not None and rank != summary.root_rank
        mentioned = cause.message.manner == "mentioned" and best > 0
        time = cause.when[1] if timed and cause.when else 0.0
        return mentioned, not_root and summary.files == 1, time, cause.message.order

    return min(equal, key=order)


def _shows_pressure(finding: Finding) -> bool:
    """Memory was short on the way: a row says so, or a full device was survived."""
    return finding.row.weight == "pressure" or (
        finding.row.kind == "out_of_memory" and finding.row.tier == "device" and finding.row.weight in _STRENGTH
    )


# From findings to a diagnosis.


def _diagnose_cause(cause: Finding, summary: LogSummary, causes: Sequence[Finding]) -> Diagnosis:
    confidence = _CONFIDENCE[cause.row.weight] - {"stated": 0.05, "mentioned": 0.15}.get(cause.message.manner, 0.0)
    same = [other for other in causes if other.row is cause.row]
    return _diagnosis(cause, confidence, same, rank=_failed_rank(cause, summary, same))


def _failed_rank(cause: Finding, summary: LogSummary, same: Sequence[Finding]) -> int | None:
    """The rank that failed. A line of the kernel or the scheduler is about the process that it names."""
    if cause.row.kind == "none":
        return cause.rank
    by_pid, by_exit = summary.ranks.of(cause.message), _rank_of_exit(summary)
    ranks: tuple[int | None, ...]
    if cause.row.weight != "decisive":
        named = {finding.rank for finding in same if finding.rank is not None}
        only_named = named.pop() if len(named) == 1 else None
        by_device = summary.ranks.of_device(cause.local)
        ranks = (cause.rank, by_pid, only_named, summary.root_rank, summary.named_rank, by_device, cause.nccl, by_exit)
    elif cause.rank is None or summary.files <= 1:
        ranks = (by_pid, summary.root_rank, by_exit, cause.rank, summary.named_rank)
    else:
        ranks = (by_pid, cause.rank, summary.root_rank, by_exit)
    return next((rank for rank in ranks if rank is not None), None)


def _rank_of_exit(summary: LogSummary) -> int | None:
    return summary.first_exit.rank if summary.first_exit is not None else None


def _diagnosis(
    finding: Finding, confidence: float, same: Sequence[Finding], *, rank: int | None = None, advice: str | None = None
) -> Diagnosis:
    """The diagnosis by a finding's row. The lines of the findings in `same` are its evidence."""
    row, message = finding.row, finding.message
    lines = list(dict.fromkeys(line for other in same for line in _telling_lines(other)))[:_EVIDENCE_LINES]
    shortage = parse_shortage(message.text)
    notes = shortage.notes() if row.tier == "device" else ()
    advice = advice or row.advice
    if notes and shortage.fragmented:
        advice = f"{notes[0][0].upper()}{notes[0][1:]}. Then: {advice}"
    elif notes:
        advice = f"{advice} ({notes[0]})"
    return Diagnosis(
        kind=row.kind,
        tier=row.tier,
        rank=rank,
        phase=_phase(message),
        confidence=round(confidence, 2),
        evidence=tuple(lines),
        places=(f"{message.file}:{message.number}",) if message.file else (f"line {message.number}",),
        action=row.action,
        advice=advice,
        notes=notes,
        signature=f"{row.file}/{row.name}",
    )


def _telling_lines(finding: Finding) -> list[str]:
    """The first line of the message, and the line that the row matched."""
    lines = [line.strip() for line in finding.message.text.splitlines() if line.strip()]
    matched = (line for line in lines if any(phrase in line.lower() for phrase in finding.row.phrases))
    telling = (*lines[:1], next(matched, ""))
    return [line[:_EVIDENCE_CHARS] for line in dict.fromkeys(filter(None, telling))]


def _pressure_advice(finding: Finding) -> str:
    if finding.row.weight == "pressure":
        return finding.row.advice
    return "memory ran out on the way and the run continued: leave headroom with a smaller micro batch or a leaner rung"


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


def _phase(message: Message) -> str | None:
    """The phase of training that the innermost telling frame belongs to."""
    for frame in reversed(message.frames):
        for pattern, phase in _PHASES:
            if pattern.search(frame):
                return phase
    return None


# Without a finding.


def _telling_exit_code(exit_code: int | None, summary: LogSummary, ended_well: bool) -> int | None:
    """The exit code that says most: a launcher's own 1 says less than the signal that it reports of a rank."""
    reported = summary.first_exit.code if summary.first_exit is not None and not ended_well else None
    if reported is not None and (reported < 0 or exit_code is None):
        return reported
    return exit_code or None


def _diagnose_exit(code: int, summary: LogSummary) -> Diagnosis:
    code = normalize_exit_code(code)
    hints = [finding for finding in summary.findings if finding.row.weight == "hint"]
    if code == -9 and hints:
        return _diagnosis(hints[-1], 0.7, hints, rank=summary.root_rank)
    exit = next((exit for exit in summary.exits if normalize_exit_code(exit.code) == code), None)
    meaning = explain_exit_code(code)
    report = exit.line if exit is not None else f"exit code {code}"
    last = [line for lines in summary.last.values() for line in lines[-1:]]
    evidence = dict.fromkeys(line[:_EVIDENCE_CHARS] for line in (report, *last) if line)
    return Diagnosis(
        kind=meaning.kind,
        tier=meaning.tier,
        rank=summary.root_rank if summary.root_rank is not None else exit.rank if exit is not None else None,
        confidence=meaning.confidence,
        evidence=tuple(evidence)[:_EVIDENCE_LINES],
        action=meaning.action,
        advice=f"{meaning.summary}: {meaning.advice}",
        signature=f"exit code {code}",
    )


def _no_failure(summary: LogSummary, exit_code: int | None) -> Diagnosis:
    if not summary.text:
        advice = "this is not text: give the log itself"
        return Diagnosis(kind="unknown", confidence=0.1, action="nothing", advice=advice)
    if not summary.bytes and exit_code is None:
        advice = "the log is empty; if the run died, give its exit code: --exit-code"
        return Diagnosis(kind="none", confidence=0.2, action="nothing", advice=advice)
    if exit_code == 0 or _finished(summary):
        return Diagnosis(kind="none", confidence=0.95, action="nothing", advice="no failure was found")
    advice = "no failure was found; if the run died all the same, give --exit-code"
    return Diagnosis(kind="none", confidence=0.6, action="nothing", advice=advice)
