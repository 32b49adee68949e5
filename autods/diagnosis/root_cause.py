"""`autods.diagnose`: why a run died, from its logs and exit code. The root cause is picked from the symptoms."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from ..arguments import check_count, checks_call, show_value
from ..errors import InputError
from ..types import Action, Tier
from ..units import format_signal
from .lines import BLOCK_BYTES
from .logs import MOST_FILES, STDIN, Listen, Log, find_logs, read_blocks
from .messages import CUT, REPORTS_FAILURE, Message
from .run_processes import MOST_SIGNAL, Exit, explain_exit_code, normalize_exit_code
from .shortage import parse_shortage
from .signatures import Kind, find_confidence, read_signatures, read_toml
from .symptoms import LogSummary, Symptom, collect_symptoms

Logs = str | PathLike[str] | Mapping[str, str] | Iterable[str | PathLike[str]]
_GIVE_TEXT = "give the log itself, as text or packed by gzip; unpack others into autods diagnose -"
_MOST_SKIPPED = 5  # names in a note
# 'logs/train.log', '/data/slurm-7.out.gz': text of a log has a space, or another end
_PATH = re.compile(r"[^\s\0]{1,1000}\.(?:log|out|err|txt)(?:\.(?:gz|bz2|xz|\d+))?")
_MOST_EXIT_CODE = 256 + MOST_SIGNAL  # PBS adds 256 to a signal
_EVIDENCE_LINES = 4
_EVIDENCE_CHARS = 400
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\w")
_ANNOUNCES = re.compile(r":$|^terminate called after throwing")  # of a message's first line: the next ones say what
_ASSERTION = re.compile(r"AssertionError:?")
_RESUMED_STEPS = 3  # of progress after a failure: the run survived it. Other ranks show a step or two more at most
_STRENGTH = {"decisive": 0, "cause": 1, "likely": 2}  # of a row's weight; the smaller is stronger
# What Python says where a step that was given up left no value behind.
_NO_VALUE = re.compile(
    r"NoneType|not associated with a value|referenced before assignment|^NameError: .* is not defined"
)
_LEAVE_HEADROOM = (
    "memory ran out on the way and the run continued: leave headroom with a smaller micro batch or a leaner rung"
)
_LEAVE_HEADROOM_OR_CATCH = (
    "memory ran out first: use a smaller micro batch or a leaner rung; then mend what the code does after it skips "
    "a step"
)
_NOT_FULL = (
    "the GPU was not full when it refused: look for a limit of this process (MPS, MIG, a memory fraction), "
    "an exhausted address space (ulimit -v) or a driver in a bad state (dmesg, nvidia-smi -q); a leaner rung does not "
    "help"
)
_HOST_FULL = re.compile(r"percent = (?:[89]\d|100)\b")  # of DeepSpeed's see_memory_usage, some time before the end
# Who ends a process from outside, mostly for its host memory.
_KILLERS = ("exit code -9", "host/kernel-killer", "host/scheduler-killer", "host/limit-of-a-batch-system")
_KILLED_PROGRAM = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)")
_TRAINING_PROGRAM = re.compile(
    r"python|^pt_|ray|torchrun|deepspeed|accelerate|train|worker|jupyter|ipykernel", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a run died, or that it did not.

    `kind` is `none` when nothing failed, and `unknown` when the evidence does not show the cause.
    `tier` is where memory ran out or was short. `rank` is the global rank that failed first by itself, if it is known.
    `ranks` are all that report the same failure, as far as the logs name them.
    `phase` is load, init, data, forward, backward, step, checkpoint or evaluation. `confidence` is the share of
    verdicts on such grounds that were right (`confidence.toml`).
    `evidence` are lines that prove it, the most telling first. `places` has the file and line of the first of them.
    `signature` is the row of `signatures/` that decided.
    `notes` are further facts, such as fragmentation, another process or an exception that was being handled.
    """

    kind: Kind
    tier: Tier | None = None
    rank: int | None = None
    phase: str | None = None
    confidence: float
    evidence: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    action: Action
    advice: str
    notes: tuple[str, ...] = ()
    signature: str | None = None
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `autods diagnose --json` prints them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@checks_call
def diagnose(log: Logs, exit_code: int | None = None) -> Diagnosis:
    """Find out why a run died.

    `log` is the text of a log or a path. A `Path` is a path, and so is a str without a line end that names an existing
    file or folder. Other str are text. Several logs, such as one per rank, are a dict of texts by name, a list of
    paths, or a folder. Files are streamed, so that memory stays bounded. `exit_code` is the run's, negative for a
    signal or as a shell reports it (137). Raises InputError for other types, for files that cannot be read or are no
    text, and for a str that looks like a path where there is no file.
    """
    code = None if exit_code is None else _check_exit_code(check_count("exit_code", exit_code))
    if isinstance(log, str) and "\n" not in log and (os.path.lexists(log) or _PATH.fullmatch(log)):
        log = Path(log)
    if isinstance(log, str | Mapping):
        texts = {"": log} if isinstance(log, str) else log
        for name, text in texts.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise InputError(f"log={show_value(log)}: text by name is needed")
        return pick_root_cause(collect_symptoms({name: _text_blocks(text) for name, text in texts.items()}), code)
    if isinstance(log, PathLike):
        return diagnose_logs(find_logs([log]), code)
    if isinstance(log, bytes | bytearray) or not isinstance(log, Iterable):
        problem = f"log={show_value(log)}: text, a path, a dict of texts or a list of paths is needed"
        raise InputError(f"{problem}, not {type(log).__name__}")
    paths = list(islice(log, MOST_FILES + 1))
    if len(paths) > MOST_FILES:
        raise InputError(f"log has more than {MOST_FILES:,} paths", hint="give the logs of one run")
    for number, path in enumerate(paths):
        if not isinstance(path, str | PathLike):
            raise InputError(f"log[{number}]={show_value(path)}: a path is needed, not {type(path).__name__}")
    return diagnose_logs(find_logs(paths), code)


def diagnose_logs(logs: Sequence[Log], exit_code: int | None, listen: Listen = lambda line: None) -> Diagnosis:
    """Find out why a run died, from logs that were found. `listen` gets lines about what takes long.

    Raises InputError if no log is text and there is no exit code. `notes` names those that are no text beside others.
    """
    if exit_code is not None:
        _check_exit_code(exit_code)
    summary = collect_symptoms({log.name: read_blocks(log, listen) for log in logs})
    if summary.not_text and not summary.text and exit_code is None:
        raise InputError("is not a text log", place=", ".join(log.place for log in logs), hint=_GIVE_TEXT)
    diagnosis = pick_root_cause(summary, exit_code)
    notes = [note for log in logs for note in log.notes]
    if skipped := summary.not_text:
        names = ", ".join(name or STDIN for name in skipped[:_MOST_SKIPPED])
        notes.append(f"{len(skipped)} of {len(logs)} logs are no text and were skipped: {names}")
    return replace(diagnosis, notes=(*diagnosis.notes, *notes))


def _check_exit_code(code: int) -> int:
    """The code. Raises InputError for an exit code that no run has."""
    if not -MOST_SIGNAL <= code <= _MOST_EXIT_CODE:
        hint = f"a run ends with 0 to {_MOST_EXIT_CODE}, or by a signal: -1 to -{MOST_SIGNAL}"
        raise InputError(f"exit code {show_value(code)} does not exist", hint=hint)
    return code


def _text_blocks(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), BLOCK_BYTES):
        yield text[start : start + BLOCK_BYTES].encode(errors="replace")


def _first(*ranks: int | None) -> int | None:
    return next((rank for rank in ranks if rank is not None), None)


def pick_root_cause(summary: LogSummary, exit_code: int | None = None) -> Diagnosis:
    """The diagnosis of a run. `exit_code` is the run's, as `subprocess` or a shell reports it, if it is known.

    The strongest evidence wins: a cause in the logs, ranks that only noticed, weak messages, the exit code,
    memory pressure that the run survived. Where the run was killed while it loaded weights or saved a checkpoint,
    that is its phase. In some phases the advice is about that first.
    """
    diagnosis, doing = _weigh(summary, exit_code), next(filter(None, summary.doing), None)
    is_killed = diagnosis.signature in _KILLERS
    if doing is not None and is_killed:
        phase, line = doing
        evidence = dict.fromkeys((*diagnosis.evidence[: _EVIDENCE_LINES - 1], _cut(line)))
        diagnosis = replace(diagnosis, phase=phase, evidence=tuple(evidence))
    end = "killed" if is_killed else f"{diagnosis.kind} {diagnosis.tier}"
    first = read_toml("log_lines")["advice_in_phase"].get(end, {}).get(diagnosis.phase)
    return replace(diagnosis, advice=f"{first}. {diagnosis.advice}") if first else diagnosis


def _weigh(summary: LogSummary, exit_code: int | None) -> Diagnosis:
    ended_well = exit_code == 0 or (exit_code is None and _finished(summary))
    alive = [symptom for symptom in summary.symptoms if not ended_well and not _survived(symptom, summary)]
    alive = [symptom for symptom in alive if not _repeats_user(symptom, summary)]
    of_run = [cause for cause in alive if cause.row.weight in _STRENGTH]
    of_run = [cause for cause in of_run if not _is_about_other_program(cause, of_run, summary, exit_code)]
    of_run = [cause for cause in of_run if not _follows_lost_peer(cause, alive, summary)]
    if causes := [cause for cause in of_run if not _is_incidental_mention(cause, of_run)]:
        diagnosis = _diagnose_cause(causes, summary)
        return _diagnose_caught_shortage(diagnosis, causes, alive) or diagnosis
    silent_end = summary.first_exit.is_silent
    if noticed := [symptom for symptom in alive if symptom.row.weight == "secondary"]:
        if silent_end:
            return _diagnose_exit(summary.first_exit.code, summary)
        return _diagnosis(noticed[0], "secondary", noticed[:1], rank=summary.exits.root_rank)
    weak = [symptom for symptom in alive if symptom.row.weight == "weak"]
    if weak and not silent_end:
        diagnosis = _diagnose_cause(weak, summary)
        return _diagnose_caught_shortage(diagnosis, weak, alive) or diagnosis
    # A launcher's own 1 says less than the signal that it reports of a rank.
    reported = 0 if ended_well else summary.first_exit.code
    if code := reported if reported < 0 or exit_code is None else exit_code:
        return _diagnose_exit(code, summary)
    if stopped := [symptom for symptom in alive if symptom.row.weight == "stopped"]:
        return _diagnosis(stopped[0], "exit code", stopped)
    if loss := next(filter(None, summary.diverged), ""):
        return _diagnose_divergence(loss)
    if pressed := [symptom for symptom in summary.symptoms if _shows_pressure(symptom)]:
        advice = pressed[0].row.advice if pressed[0].row.weight == "pressure" else _LEAVE_HEADROOM
        diagnosis = _diagnosis(pressed[0], "pressure", pressed, advice=advice)
        return replace(diagnosis, kind="memory_pressure", action="leaner_rung")
    return _no_failure(summary, exit_code)


# Which symptoms count.


def _survived(symptom: Symptom, summary: LogSummary) -> bool:
    """Whether the run trained on after it, or it was no failure at all."""
    if symptom.row.weight in ("done", "benign") or symptom.message.ignored:
        return True
    progress = summary.progress.get(symptom.message.file, 0) - symptom.message.progress
    return progress >= _RESUMED_STEPS


def _repeats_user(symptom: Symptom, summary: LogSummary) -> bool:
    """Whether a line only logs what an exception of the user's code says."""
    if symptom.message.frames or symptom.row.emitter == "any":
        return False
    return any(words in symptom.message.text for words in summary.user_words)


def _finished(summary: LogSummary) -> bool:
    """Whether a line says that the run ended well, and no failure follows it, in its file or in that of another rank.

    A timeout of a collective is one where it is logged as an error: peers that are gone are usual at the end of a run.
    """
    done = [symptom for symptom in summary.symptoms if symptom.row.weight == "done"]
    if not done or summary.first_exit.code != 0:
        return False
    last = {symptom.message.file: symptom for symptom in done}
    failed = (
        symptom
        for symptom in summary.symptoms
        if symptom.row.weight in _STRENGTH
        or (symptom.row.weight == "secondary" and symptom.message.prefix.level == "error")
    )
    return not any(
        _is_after(symptom, last.get(symptom.message.file, done[-1])) and not _survived(symptom, summary)
        for symptom in failed
    )


def _is_after(symptom: Symptom, other: Symptom) -> bool:
    """Whether a symptom comes after another one: by place in one file, by the clock in two. Without clocks it does."""
    if symptom.message.file == other.message.file:
        return symptom.message.order > other.message.order
    when, before = symptom.when, other.when
    return when is None or before is None or when[0] != before[0] or when[1] > before[1]


def _is_about_other_program(
    cause: Symptom, causes: Sequence[Symptom], summary: LogSummary, exit_code: int | None
) -> bool:
    """The kernel killed a program that does not belong to the run, and the run ended by an exception of its own."""
    killed = _KILLED_PROGRAM.search(cause.message.text) if cause.row.weight == "decisive" else None
    if killed is None or _TRAINING_PROGRAM.search(killed[2]) or int(killed[1]) in summary.ranks.pids:
        return False
    if -9 in (normalize_exit_code(exit_code or 0), normalize_exit_code(summary.first_exit.code)):
        return False
    return any(other.message.manner == "raised" for other in causes)


def _follows_lost_peer(cause: Symptom, alive: Sequence[Symptom], summary: LogSummary) -> bool:
    """torch's rendezvous or store failed after a peer was gone, or srun cancelled the step: neither is the cause.

    No failure of the network is one either, where torchrun names another rank, which a signal ended, as the first.
    """
    first, is_of_network = summary.first_exit, (cause.row.kind, cause.row.action) == ("communication", "retry")
    if is_of_network and first.root and first.is_silent and summary.rank(cause) != first.rank:
        return True
    return ((cause.row.file == "communication" and cause.row.emitter == "torch") or cause.row.name == "cancelled") and (
        any(
            other.row.weight == "secondary"
            and other.message.file == cause.message.file
            and other.message.order < cause.message.order
            for other in alive
        )
    )


def _is_incidental_mention(cause: Symptom, causes: Sequence[Symptom]) -> bool:
    """A plain line mentions a full device, and later an exception of the script itself ended the same process."""
    row, message = cause.row, cause.message
    if row.kind != "out_of_memory" or row.tier != "device" or row.weight == "decisive":
        return False
    if message.manner == "raised" or message.type or message.prefix.level == "error":
        return False
    if REPORTS_FAILURE.match(message.text) or "tried to allocate" in message.text.lower():
        return False
    return any(
        other.message.manner == "raised"
        and other.row.kind in ("user_code", "config")
        and other.message.file == message.file
        and other.message.order > message.order
        and (other.rank == cause.rank or None in (other.rank, cause.rank))
        for other in causes
    )


def _shows_pressure(symptom: Symptom) -> bool:
    """Memory was short on the way: a row says so, or a full device was survived."""
    return symptom.row.weight == "pressure" or (
        symptom.row.kind == "out_of_memory"
        and symptom.row.tier == "device"
        and symptom.row.weight in (*_STRENGTH, "weak")
    )


def _diagnose_caught_shortage(
    diagnosis: Diagnosis, causes: Sequence[Symptom], alive: Sequence[Symptom]
) -> Diagnosis | None:
    """Memory ran out, the code caught that, and then died of a value that was missing: both, the cause first.

    A traceback without its end counts as such a death.
    """
    deaths = (
        cause
        for cause in causes
        if (cause.message.manner == "raised" and _NO_VALUE.search(cause.message.text))
        or cause.message.text.startswith(CUT)
    )
    death = next(deaths, None)
    if death is None or diagnosis.kind not in ("user_code", "out_of_memory", "unknown"):
        return None
    later = f"the code caught it, and died later of: {_telling_lines(death)[0]}"
    if diagnosis.kind == "out_of_memory":
        return replace(diagnosis, notes=(*diagnosis.notes, later))
    caught = [
        symptom
        for symptom in alive
        if symptom.row.name == "recovered"
        and (symptom.message.file, symptom.message.prefix.stream) == (death.message.file, death.message.prefix.stream)
        and symptom.message.order < death.message.order
    ]
    if not caught:
        return None
    shortage = _diagnosis(
        caught[-1], "caught", [*caught[-1:], death], rank=diagnosis.rank, advice=_LEAVE_HEADROOM_OR_CATCH
    )
    return replace(shortage, kind="out_of_memory", notes=(*shortage.notes, later))


# From symptoms to a diagnosis.


def _diagnose_cause(causes: Sequence[Symptom], summary: LogSummary) -> Diagnosis:
    """The diagnosis by the first in time of the strongest causes: by the clock across files, else by place."""
    best = min(_STRENGTH.get(cause.row.weight, 3) for cause in causes)
    equal = [cause for cause in causes if _STRENGTH.get(cause.row.weight, 3) == best]
    kinds = {cause.when[0] if cause.when else None for cause in equal}
    timed = summary.files > 1 and len(kinds) == 1 and None not in kinds
    root_rank = summary.exits.root_rank

    def order(cause: Symptom) -> tuple[bool, bool, str, int]:
        mentioned = cause.message.manner == "mentioned" and best > 0
        rank = summary.rank(cause)
        not_root = summary.files == 1 and root_rank is not None and rank not in (None, root_rank)
        return mentioned, not_root, cause.when[1] if timed and cause.when else "", cause.message.order

    cause = min(equal, key=order)
    grounds = f"{cause.row.weight} {cause.message.manner}"
    same = [other for other in causes if other.row is cause.row]
    diagnosis = _diagnosis(cause, grounds, same, rank=_failed_rank(cause, summary, same))
    ranks = {rank for symptom in same if (rank := summary.rank(symptom)) is not None}
    return replace(diagnosis, ranks=tuple(sorted(ranks)))


def _failed_rank(cause: Symptom, summary: LogSummary, same: Sequence[Symptom]) -> int | None:
    """The rank that failed. A line of the kernel or the scheduler is about the process that it names."""
    if cause.row.kind == "none":
        return cause.rank
    by_pid, by_exit, root_rank = summary.ranks.of(cause.message), summary.first_exit.rank, summary.exits.root_rank
    if cause.row.weight != "decisive":
        named = {symptom.rank for symptom in same if symptom.rank is not None}
        only_named = named.pop() if len(named) == 1 else None
        by_device = summary.ranks.of_device(cause.local)
        return _first(cause.rank, by_pid, only_named, root_rank, by_device, cause.nccl, by_exit)
    if cause.rank is None or summary.files <= 1:
        return _first(by_pid, root_rank, by_exit, cause.rank)
    return _first(by_pid, cause.rank)


def _diagnosis(
    symptom: Symptom, grounds: str, same: Sequence[Symptom], *, rank: int | None = None, advice: str = ""
) -> Diagnosis:
    """The diagnosis by a symptom's row, as sure as verdicts on such grounds are.

    Its lines are the evidence, and those of the symptoms in `same`. Lines that differ in numbers only, as those of
    eight ranks do, are shown once.
    """
    row, message = symptom.row, symptom.message
    shown: dict[str, str] = {}
    for line in (line for other in (symptom, *same) for line in _telling_lines(other)):
        shown.setdefault(_NUMBER.sub("", line), line)
    lines = list(shown.values())[:_EVIDENCE_LINES]
    shortage = parse_shortage(message.text)
    notes = shortage.notes() if row.tier == "device" else ()
    advice = (advice or row.advice).replace("{line}", lines[-1] if lines else "")
    if row.kind == "user_code" and (frame := message.user_frame) is not None:
        lines = [*lines[: _EVIDENCE_LINES - 1], _cut(frame)]
    if row.tier == "device" and row.kind == "out_of_memory" and shortage.contradicts_itself:
        row, advice, notes = replace(row, kind="infrastructure", tier=None, action="fix_environment"), _NOT_FULL, ()
    if notes and shortage.fragmented:
        advice = f"{notes[0][0].upper()}{notes[0][1:]}. Then: {advice}"
    elif notes:
        advice = f"{advice} ({notes[0]})"
    if row.kind == "out_of_memory" and message.handled:
        first = _cut(message.handled)
        notes = (*notes, f"it was raised while another exception was handled, which may be the cause: {first}")
    return Diagnosis(
        kind=row.kind,
        tier=row.tier,
        rank=rank,
        phase=_phase(message),
        confidence=find_confidence(grounds),
        evidence=tuple(lines),
        places=(f"{message.file}:{message.number}",) if message.file else (f"line {message.number}",),
        action=row.action,
        advice=advice,
        notes=notes,
        signature=f"{row.file}/{row.name}",
    )


def _cut(line: str) -> str:
    return line if len(line) <= _EVIDENCE_CHARS else f"{line[: _EVIDENCE_CHARS - 1]}…"


def _telling_lines(symptom: Symptom) -> list[str]:
    """The first line of the message, those that it announces, and the one that the row matched. ===== is no line.

    A bare "AssertionError" says nothing: the statement that failed comes after it.
    """
    lines = [line.strip() for line in symptom.message.text.splitlines() if _WORD.search(line)]
    announced = lines[1:_EVIDENCE_LINES] if lines and _ANNOUNCES.search(lines[0]) else []
    matched = filter(symptom.row.tells, lines)
    asserted = [frame for frame in symptom.message.frames[-1:] if len(lines) == 1 and _ASSERTION.fullmatch(lines[0])]
    telling = dict.fromkeys((*lines[:1], *islice(matched, 1), *announced, *asserted))
    return [_cut(line) for line in telling]


_PHASES = [(re.compile(pattern), phase) for pattern, phase in read_toml("log_lines")["phases"]]


def _phase(message: Message) -> str | None:
    """The phase of training that the innermost telling frame belongs to."""
    phases = (phase for frame in reversed(message.frames) for pattern, phase in _PHASES if pattern.search(frame))
    return next(phases, None)


def _diagnose_exit(reported: int, summary: LogSummary) -> Diagnosis:
    """The diagnosis by an exit code alone, as a shell or `subprocess` reports it."""
    code = normalize_exit_code(reported)
    exits = (exit for exit in (summary.first_exit, *summary.exits.exits) if normalize_exit_code(exit.code) == code)
    signal_name = f" ({format_signal(-code)})" if code < 0 else ""
    exit = next(exits, Exit(code, line=f"exit code {reported}{signal_name}"))
    full = (
        next((line for line in summary.host_memory if _HOST_FULL.search(line)), "") if code == -signal.SIGKILL else ""
    )
    meaning = explain_exit_code(code, host_full=bool(full))
    last = [line.strip() for lines in summary.last.values() for line in list(filter(_WORD.search, lines))[-1:]]
    last = [line for line in last if not exit.line or exit.line.strip() not in line]
    evidence = dict.fromkeys(_cut(line) for line in (exit.line, full, *last) if line)
    return Diagnosis(
        kind=meaning.kind,
        tier=meaning.tier,
        rank=_first(summary.exits.root_rank, exit.rank),
        confidence=find_confidence("likely mentioned" if full else "exit code"),
        evidence=tuple(evidence)[:_EVIDENCE_LINES],
        action=meaning.action,
        advice=f"{meaning.summary}: {meaning.advice}",
        signature=f"exit code {code}",
    )


def _diagnose_divergence(line: str) -> Diagnosis:
    """The diagnosis of a run that trained on although its loss was no number any more, by the line that shows it."""
    row = next(row for row in read_signatures() if row.name == "not-a-number")
    return Diagnosis(
        kind=row.kind,
        confidence=find_confidence(f"{row.weight} mentioned"),
        evidence=(_cut(line),),
        action=row.action,
        advice=row.advice,
        signature=f"{row.file}/{row.name}",
    )


def _no_failure(summary: LogSummary, exit_code: int | None) -> Diagnosis:
    """The diagnosis where no message and no exit code shows a failure. A run that ended well has no advice."""
    kind: Kind = "none"
    if summary.bytes and not summary.text:
        kind, grounds, advice = "unknown", "no text", "this is not text: give the log itself"
    elif not summary.bytes and exit_code is None:
        grounds, advice = "empty", "the log is empty; if the run died, give its exit code: --exit-code"
    elif exit_code == 0 or _finished(summary):
        grounds, advice = "ended well", ""
    else:
        grounds, advice = "no failure", "if the run died all the same, give its exit code: --exit-code"
    return Diagnosis(kind=kind, confidence=find_confidence(grounds), action="nothing", advice=advice)
