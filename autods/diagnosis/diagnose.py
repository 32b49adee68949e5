"""`autods.diagnose`: why a run died, from its logs and exit code."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from os import PathLike
from pathlib import Path

from ..errors import InputError
from ..requests import check_count, show_value
from .exit_codes import MOST_SIGNAL
from .logs import MOST_FILES, STDIN, Listen, Log, Waits, find_logs, read_blocks
from .messages import REPORTS_FAILURE, Assembler, Message
from .ranks import find_local_gpu, find_nccl_device, find_rank
from .reader import BLOCK_BYTES, Reader
from .root_cause import Finding, LogSummary, pick_root_cause
from .rules import ERROR_LINE, Signature, find_signature
from .values import Diagnosis

Logs = str | PathLike[str] | Mapping[str, str] | Iterable[str | PathLike[str]]
# Exceptions that only report others, of a child or of a group. The cause is a message of its own.
_REPORTS_OTHERS = (
    "ChildFailedError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "ExceptionGroup",
    "BaseExceptionGroup",
)
# The line is about memory running out, not a report of it: release notes, settings, advice.
_ONLY_TALKS = re.compile(
    r"(?:previous|earlier|last) (?:run|attempt|trial|try|job|launch)\b|\bexamples? of\b|\brow \d+\b.{0,4}[\"']"
    r"|skip\w* (?:the )?(?:test|benchmark)|\bdry[- ]?run\b"
    r"|^(?!.*(?:tried to allocate|killed process|errno)).*"
    r"\b(?:changelog|release notes?|fix(?:ed|es)|avoid(?:s|ed|ing)?|prevents?|preventing|known issues?|faq|how to)\b",
    re.IGNORECASE | re.DOTALL,
)
_GIVE_TEXT = "give the log itself, as text or packed by gzip, bzip2 or xz; unpack others into autods diagnose -"
_MOST_SKIPPED = 5  # names in a note
# 'logs/train.log', '/data/slurm-7.out.gz': text of a log has a space, or another end
_PATH = re.compile(r"[^\s\0]{1,1000}\.(?:log|out|err|txt)(?:\.(?:gz|bz2|xz|\d+))?")
_MOST_EXIT_CODE = 256 + MOST_SIGNAL  # PBS adds 256 to a signal
_LEAST_WORDS = 8  # characters of a user's exception by which a line that repeats it is known
_MOST_USER_WORDS = 200
_MOST_FINDINGS = 400  # per row; findings that say that the run ended well are all kept
_MANY_FINDINGS = 2000  # of all rows, from which on few of each are kept
_FEW = 40  # findings per row then, and those for which the time of the line is looked up
_LEAST_PRINTABLE = 0.7  # of a block's bytes; with less it is not text
_CONTROL_BYTES = bytes((*range(7), *range(14, 27), 127))


def diagnose(log: Logs, exit_code: int | None = None) -> Diagnosis:
    """Find out why a run died.

    `log` is the text of a log or a path. A `Path` is a path, and so is a str without a line end that names an existing
    file or folder. Other str are text. Several logs, such as one per rank, are a dict of texts by name, a list of paths,
    or a folder. Files are streamed, so that memory stays bounded. `exit_code` is the run's, negative for a signal or as
    a shell reports it (137). Raises InputError for other types, for files that cannot be read or are no text, and for
    a str that looks like a path where there is no file.
    """
    code = None if exit_code is None else check_count("exit_code", exit_code)
    if isinstance(log, str) and "\n" not in log and (os.path.lexists(log) or _PATH.fullmatch(log)):
        log = Path(log)
    if isinstance(log, str | Mapping):
        texts = {"": log} if isinstance(log, str) else log
        for name, text in texts.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise InputError(f"log={show_value(log)}: text by name is needed")
        return pick_root_cause(_read_logs({name: _text_blocks(text) for name, text in texts.items()}, code), code)
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
    waits = Waits()
    summary = _read_logs({log.name: read_blocks(log, listen, waits) for log in logs}, exit_code)
    if summary.not_text and not summary.text and exit_code is None:
        raise InputError("is not a text log", place=", ".join(log.place for log in logs), hint=_GIVE_TEXT)
    diagnosis = pick_root_cause(summary, exit_code)
    notes = [note for log in logs for note in log.notes]
    if skipped := summary.not_text:
        names = ", ".join(name or STDIN for name in skipped[:_MOST_SKIPPED])
        notes.append(f"{len(skipped)} of {len(logs)} logs are no text and were skipped: {names}")
    return replace(diagnosis, notes=(*diagnosis.notes, *notes))


def _read_logs(logs: Mapping[str, Iterator[bytes]], exit_code: int | None) -> LogSummary:
    """The summary of logs by name. Raises InputError for an exit code that no run has."""
    if exit_code is not None and not -MOST_SIGNAL <= exit_code <= _MOST_EXIT_CODE:
        hint = f"a run ends with 0 to {_MOST_EXIT_CODE}, or by a signal: -1 to -{MOST_SIGNAL}"
        raise InputError(f"exit code {show_value(exit_code)} does not exist", hint=hint)
    summary = LogSummary(files=len(logs))
    for name, blocks in logs.items():
        _read_log(name, blocks, summary)
    return summary


def _text_blocks(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), BLOCK_BYTES):
        yield text[start : start + BLOCK_BYTES].encode(errors="replace")


def _read_log(name: str, blocks: Iterator[bytes], summary: LogSummary) -> None:
    """Add one file to the summary."""
    first = next(blocks, b"")
    if not _is_text(first):
        summary.bytes += len(first)
        summary.not_text.append(name)
        return
    assembler = Assembler()
    reader = Reader(name, lambda: assembler.waiting)
    row_counts: Counter[str] = Counter()
    for line in reader.read(itertools.chain((first,), blocks)):
        for message in assembler.feed(line):
            _add_message(message, summary, row_counts, reader)
    for message in assembler.finish():
        _add_message(message, summary, row_counts, reader)
    summary.text = True
    summary.bytes += reader.bytes
    summary.lines += reader.number
    summary.progress |= {**reader.parts, reader.file: reader.progress}
    summary.files += len(reader.parts)
    summary.last[name] = reader.last


def _add_message(message: Message, summary: LogSummary, row_counts: Counter[str], reader: Reader) -> None:
    """Match a message with the rows, and keep the ranks and exit codes that it reports."""
    summary.ranks.read(message)
    if message.by_user and len(summary.user_words) < _MOST_USER_WORDS:
        first_line = message.text.partition(": ")[2].partition("\n")[0].strip("'\"")  # a key has quotes
        if len(first_line) >= _LEAST_WORDS:
            summary.user_words.add(first_line)
    row = _matching_row(message)
    about_run = not message.by_user and not (row and row.vanished)
    reports_exit = about_run and any(summary.exits.read(line) for line in message.text.splitlines())
    if row is None:
        return
    if reports_exit and row.weight in ("likely", "weak") and row.file in ("user_code", "config", "communication"):
        return
    row_counts[row.name] += 1
    message.order = summary.lines + message.number
    most = _MOST_FINDINGS if len(summary.findings) < _MANY_FINDINGS else _FEW
    if row_counts[row.name] <= most or row.weight == "done":
        rank = find_rank(message, row.weight, summary.files + len(reader.parts))
        local = find_local_gpu(message)
        when = reader.when(message.number) if row_counts[row.name] <= _FEW else None
        if rank is None and local is not None:
            summary.ranks.gpus.add(local)
        summary.findings.append(Finding(row, message, rank, local, find_nccl_device(message), when))
    if row.weight in ("cause", "likely", "weak", "pressure"):
        reader.watch()
        message.progress = reader.progress


# A line that names an exception, or the level ERROR, after a program's own prefix.
_NAMES_ERROR = re.compile(r"[\w.:/ -]{0,60}?\b(?:[A-Z]\w*(?:Error|Exception): \S|ERROR\b)")


def _matching_row(message: Message) -> Signature | None:
    if message.manner == "quoted" or message.type in _REPORTS_OTHERS:
        return None
    is_error = (
        message.prefix.level == "error" or REPORTS_FAILURE.match(message.text) or _NAMES_ERROR.match(message.text)
    )
    type = message.type or (ERROR_LINE if is_error and message.manner == "stated" else "")
    passing = message.manner == "mentioned"
    row = find_signature(message.text, type=type, stack=message.stack, passing=passing, by_user=message.by_user)
    if row is None and message.prefix.level == "warning":
        row = find_signature(message.text)
        row = replace(row, weight="weak") if row is not None and _counts_as_warning(row) else None
    if row is not None and row.kind == "out_of_memory" and not message.type and _ONLY_TALKS.search(message.text):
        return None
    return row


def _counts_as_warning(row: Signature) -> bool:
    """Whether a warning counts where nothing else does: torch has no memory or no peers. Others are in healthy logs."""
    return (
        row.emitter == "torch" and row.kind in ("out_of_memory", "communication") and row.weight in ("cause", "likely")
    )


def _is_text(block: bytes) -> bool:
    sample = block[:65536].strip(b"\0")  # of a hole
    text = sample.translate(None, _CONTROL_BYTES)
    undecodable = text.decode("utf-8", errors="replace").count("\ufffd")
    few_control_bytes = len(sample) - len(text) <= len(sample) * 0.05
    return not block or (bool(sample) and few_control_bytes and undecodable < len(sample) * (1 - _LEAST_PRINTABLE))
