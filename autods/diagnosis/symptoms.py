"""The symptoms of a run: messages of its logs, and the signatures that they match."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from .lines import Clock, Reader
from .messages import REPORTS_FAILURE, Assembler, Message
from .run_processes import Exit, RankClues, ReportedExits, find_local_gpu, find_nccl_device, find_rank
from .signatures import ERROR_LINE, Signature, find_signature

# Exceptions that only report others, of a child or of a group. The cause is a message of its own.
_REPORTS_OTHERS = (
    "ChildFailedError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "ExceptionGroup",
    "BaseExceptionGroup",
    "AlgorithmError",  # SageMaker's
)
# The line is about memory running out, not a report of it: release notes, settings, advice.
_ONLY_TALKS = re.compile(
    r"(?:previous|earlier|last) (?:run|attempt|trial|try|job|launch)\b|\bexamples? of\b|\brow \d+\b.{0,4}[\"']"
    r"|skip\w* (?:the )?(?:test|benchmark)|\bdry[- ]?run\b"
    r"|^(?!.*(?:tried to allocate|killed process|errno)).*"
    r"\b(?:changelog|release notes?|fix(?:ed|es)|avoid(?:s|ed|ing)?|prevents?|preventing|known issues?|faq|how to)\b",
    re.IGNORECASE | re.DOTALL,
)
_LEAST_WORDS = 8  # characters of a user's exception by which a line that repeats it is known
_MOST_USER_WORDS = 200
_MOST_SYMPTOMS = 400  # per row; symptoms that say that the run ended well are all kept
_MANY_SYMPTOMS = 2000  # of all rows, from which on few of each are kept
_FEW = 40  # symptoms per row then, and those for which the time of the line is looked up
_LEAST_PRINTABLE = 0.7  # of a block's bytes; with less it is not text
_CONTROL_BYTES = bytes((*range(7), *range(14, 27), 127))


@dataclass(slots=True)
class Symptom:
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


@dataclass
class LogSummary:
    """Everything that was read from the logs of one run.

    `progress` maps a file to the training progress at its end, `last` maps it to its last lines.
    `doing` is the phase, load or checkpoint, in which a file ends, and the line that shows it. `host_memory` is
    DeepSpeed's last line about that, in each file. `diverged` is a file's last line with a loss, where that is no
    number. `user_words` are what exceptions of the user's code say. `text` tells whether any file was text; `not_text`
    names those that were none.
    """

    symptoms: list[Symptom] = field(default_factory=list)
    exits: ReportedExits = field(default_factory=ReportedExits)
    ranks: RankClues = field(default_factory=RankClues)
    user_words: set[str] = field(default_factory=set)
    progress: dict[str, int] = field(default_factory=dict)
    last: dict[str, list[str]] = field(default_factory=dict)
    doing: list[tuple[str, str] | None] = field(default_factory=list)
    host_memory: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    bytes: int = 0
    lines: int = 0  # of the files that were read to their end
    files: int = 1
    text: bool = False
    not_text: list[str] = field(default_factory=list)

    @cached_property
    def first_exit(self) -> Exit:
        """The exit that counts; code 0 without one."""
        return self.exits.first or Exit(0)

    def rank(self, symptom: Symptom) -> int | None:
        """The rank that a symptom is about: by the message, then by its process id, then by its GPU."""
        ranks = (symptom.rank, self.ranks.of(symptom.message), self.ranks.of_device(symptom.local))
        return next((rank for rank in ranks if rank is not None), None)


def collect_symptoms(logs: Mapping[str, Iterator[bytes]]) -> LogSummary:
    """The summary of logs, which are blocks of UTF-8 by name."""
    summary = LogSummary(files=len(logs))
    for name, blocks in logs.items():
        _read_log(name, blocks, summary)
    return summary


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
    summary.doing.append(reader.doing)
    summary.host_memory.append(reader.host_memory)
    summary.diverged.append(reader.diverged)


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
    most = _MOST_SYMPTOMS if len(summary.symptoms) < _MANY_SYMPTOMS else _FEW
    if row_counts[row.name] <= most or row.weight == "done":
        rank = find_rank(message, row.weight, summary.files + len(reader.parts))
        local = find_local_gpu(message)
        when = reader.when(message.number) if row_counts[row.name] <= _FEW else None
        if rank is None and local is not None:
            summary.ranks.gpus.add(local)
        summary.symptoms.append(Symptom(row, message, rank, local, find_nccl_device(message), when))
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
