"""`autods.diagnose`: why a run died, from its logs and exit code."""

from __future__ import annotations

import codecs
import gzip
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path

from ..errors import InputError
from .messages import REPORTS_FAILURE, Assembler, Message
from .ranks import find_local_gpu, find_nccl_device, find_rank
from .reader import BLOCK_BYTES, Reader
from .root_cause import Finding, LogSummary, pick_root_cause
from .rules import ERROR_LINE, Signature, find_signature
from .values import Diagnosis

Log = str | PathLike[str] | Mapping[str, str]
# Exceptions of launchers, which only report that a child failed. The child's message stands in another place.
_LAUNCHER_ERRORS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
_ASCEND_RANK = re.compile(r"\bRankID:(\d+)\)")
# The line is about memory running out, not a report of it: release notes, settings, advice.
_ONLY_TALKS = re.compile(
    r"(?:previous|earlier|last) (?:run|attempt|trial|try|job|launch)\b|\bexamples? of\b|\brow \d+\b.{0,4}[\"']"
    r"|skip\w* (?:the )?(?:test|benchmark)"
    r"|^(?!.*(?:tried to allocate|killed process|errno)).*"
    r"\b(?:changelog|release notes?|fix(?:ed|es)|avoid(?:s|ed|ing)?|prevents?|preventing|known issues?|faq|how to)\b",
    re.IGNORECASE | re.DOTALL,
)
_MOST_FINDINGS = 400  # per row; findings that say that the run ended well are all kept
_MOST_TIMES = 40  # findings per row for which the time of the line is looked up
_LEAST_PRINTABLE = 0.7  # of a block's bytes; with less it is not text
_CONTROL_BYTES = bytes((*range(7), *range(14, 27), 127))


def diagnose(log: Log | Iterable[PathLike[str]], exit_code: int | None = None) -> Diagnosis:
    """Find out why a run died.

    `log` is the text or the path of a log. Several logs, such as one per rank, are a dict of texts by name, or a list
    of paths. Files are streamed, so that memory stays bounded. `exit_code` is the run's, negative for a signal or as a
    shell reports it (137). Raises InputError for a path that cannot be read.
    """
    logs: dict[str, Iterator[bytes]]
    if isinstance(log, str | Mapping):
        texts = {"": log} if isinstance(log, str) else log
        logs = {name: _text_blocks(text) for name, text in texts.items()}
    else:
        paths = [Path(log)] if isinstance(log, PathLike) else [Path(path) for path in log]
        logs = {name: read_blocks(path) for name, path in name_logs(paths).items()}
    summary = LogSummary(files=len(logs))
    for name, blocks in logs.items():
        _read_log(name, blocks, summary)
    return pick_root_cause(summary, exit_code)


def name_logs(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the path of every log in the given files and folders, by short name. Raises InputError if there is none."""
    logs: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise InputError("no such file", place=str(path), hint="give the log of the run, or a folder of logs")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not inside:
                raise InputError("the folder has no files", place=str(path), hint="give the log of the run")
            logs |= {str(file.relative_to(path)): file for file in inside}
        else:
            logs[path.name if path.name not in logs else str(path)] = path
    return logs


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's text as blocks of UTF-8; gzip and UTF-16 are read too. Raises InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            stream = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file
            block = stream.read(BLOCK_BYTES)
            is_utf_16 = block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace") if is_utf_16 else None
            while block:
                yield decoder.decode(block).encode() if decoder else block
                block = stream.read(BLOCK_BYTES)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", place=str(path)) from None


def _text_blocks(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), BLOCK_BYTES):
        yield text[start : start + BLOCK_BYTES].encode(errors="replace")


def _read_log(name: str, blocks: Iterator[bytes], summary: LogSummary) -> None:
    """Add one file to the summary."""
    first = next(blocks, b"")
    if not _is_text(first):
        summary.bytes += len(first)
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
    summary.progress |= {**reader.parts, reader.file: reader.progress}
    summary.files += len(reader.parts)
    summary.last[name] = reader.last


def _add_message(message: Message, summary: LogSummary, row_counts: Counter[str], reader: Reader) -> None:
    """Match a message with the rows, and keep the ranks and exit codes that it reports."""
    summary.ranks.read(message)
    reports_exit = any(summary.exits.read(line) for line in message.text.splitlines())
    if summary.named_rank is None and (match := _ASCEND_RANK.search(message.text)):
        summary.named_rank = int(match[1])
    row = _matching_row(message)
    if row is None:
        return
    if reports_exit and row.weight in ("likely", "weak") and row.file in ("user_code", "communication"):
        return
    row_counts[row.name] += 1
    message.order = len(summary.findings)
    if row_counts[row.name] <= _MOST_FINDINGS or row.weight == "done":
        rank = find_rank(message, row.weight, summary.files + len(reader.parts))
        local = find_local_gpu(message)
        when = reader.when(message.number) if row_counts[row.name] <= _MOST_TIMES else None
        if rank is None and local is not None:
            summary.ranks.gpus.add(local)
        summary.findings.append(Finding(row, message, rank, local, find_nccl_device(message), when))
    if row.weight in ("cause", "likely"):
        reader.watch()
        message.progress = reader.progress


def _matching_row(message: Message) -> Signature | None:
    if message.manner == "quoted" or message.type in _LAUNCHER_ERRORS:
        return None
    is_error = message.prefix.level == "error" or REPORTS_FAILURE.match(message.text) is not None
    type = message.type or (ERROR_LINE if is_error and message.manner == "stated" else "")
    row = find_signature(message.text, type=type, stack=message.stack, passing=message.manner == "mentioned")
    if row is not None and row.kind == "out_of_memory" and not message.type and _ONLY_TALKS.search(message.text):
        return None
    return row


def _is_text(block: bytes) -> bool:
    sample = block[:65536]
    text = sample.translate(None, _CONTROL_BYTES)
    undecodable = text.decode("utf-8", errors="replace").count("\ufffd")
    few_control_bytes = len(sample) - len(text) <= len(sample) * 0.05
    return not sample or (few_control_bytes and undecodable < len(sample) * (1 - _LEAST_PRINTABLE))
