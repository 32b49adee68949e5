"""`autods.diagnose`: why a run died, from its logs and exit code."""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import IO

from ..errors import InputError
from .exit_codes import ExitCodes
from .messages import REPORTS_FAILURE, Assembler, Message
from .reader import BLOCK_BYTES, Reader
from .root_cause import LogSummary, make_finding, pick_root_cause
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
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def diagnose(log: Log | Iterable[PathLike[str]], exit_code: int | None = None) -> Diagnosis:
    """Find out why a run died.

    `log` is the text or the path of a log. Several logs, such as one per rank, are a dict of texts by name, or a list
    of paths. Files are streamed, so that memory stays bounded. `exit_code` is the run's, negative for a signal or as a
    shell reports it (137). Raises InputError for a path that cannot be read.
    """
    if isinstance(log, str):
        return _diagnose_blocks([("", _text_blocks(log))], exit_code)
    if isinstance(log, Mapping):
        return _diagnose_blocks([(name, _text_blocks(text)) for name, text in log.items()], exit_code)
    paths = [Path(log)] if isinstance(log, PathLike) else [Path(path) for path in log]
    names = name_logs(paths)
    return _diagnose_blocks([(name, read_blocks(path)) for name, path in names.items()], exit_code)


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
            zipped = file.read(2) == b"\x1f\x8b"
        opened: IO[bytes] = gzip.open(path) if zipped else path.open("rb")  # type: ignore[assignment]
        with opened as file:
            yield from _utf8(file)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", place=str(path)) from None


def _utf8(file: IO[bytes]) -> Iterator[bytes]:
    block = file.read(BLOCK_BYTES)
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace") if block[:2] in _UTF16_MARKS else None
    while block:
        yield decoder.decode(block).encode() if decoder else block
        block = file.read(BLOCK_BYTES)


def _text_blocks(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), BLOCK_BYTES):
        yield text[start : start + BLOCK_BYTES].encode(errors="replace")


def _diagnose_blocks(logs: Sequence[tuple[str, Iterable[bytes]]], exit_code: int | None) -> Diagnosis:
    summary, exit_codes = LogSummary(files=len(logs)), ExitCodes()
    are_text = [_read_log(name, blocks, summary, exit_codes) for name, blocks in logs]
    summary.exits = exit_codes.exits
    summary.first_exit, summary.root_rank = exit_codes.first, exit_codes.root_rank
    summary.text = any(are_text) or not summary.bytes
    return pick_root_cause(summary, exit_code)


def _read_log(name: str, blocks: Iterable[bytes], summary: LogSummary, exit_codes: ExitCodes) -> bool:
    """Add one file to the summary; returns whether it was text."""
    assembler = Assembler()
    reader = Reader(name, lambda: assembler.waiting)
    row_counts: dict[str, int] = {}
    is_text = True

    def checked_blocks() -> Iterator[bytes]:
        nonlocal is_text
        for number, block in enumerate(blocks):
            if number == 0:
                is_text = _is_text(block)
            yield block.replace(b"\0", b"") if b"\0" in block else block

    def add(messages: Iterable[Message]) -> None:
        for message in messages:
            _add_message(message, summary, exit_codes, row_counts, reader)

    for line in reader.read(checked_blocks()):
        if not is_text:
            break
        add(assembler.feed(line))
    add(assembler.finish())
    summary.bytes += reader.bytes
    summary.progress |= reader.ended()
    summary.files += len(reader.parts)
    summary.last[name] = reader.last if is_text else []
    return is_text


def _add_message(
    message: Message, summary: LogSummary, exit_codes: ExitCodes, row_counts: dict[str, int], reader: Reader
) -> None:
    """Match a message with the rows, and keep the ranks and exit codes that it reports."""
    summary.ranks.read(message)
    reports_exit = any(exit_codes.read(line) for line in message.text.splitlines())
    if summary.named_rank is None and (match := _ASCEND_RANK.search(message.text)):
        summary.named_rank = int(match[1])
    row = _matching_row(message)
    if row is None:
        return
    if reports_exit and row.weight in ("likely", "weak") and row.file in ("user_code", "communication"):
        return
    row_counts[row.name] = row_counts.get(row.name, 0) + 1
    message.order = len(summary.findings)
    if row_counts[row.name] <= _MOST_FINDINGS or row.weight == "done":
        when = reader.when(message.number) if row_counts[row.name] <= _MOST_TIMES else None
        finding = make_finding(row, message, summary.files + len(reader.parts), when)
        if finding.rank is None and finding.local is not None:
            summary.ranks.gpus.add(finding.local)
        summary.findings.append(finding)
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
    sample = block[:65536].replace(b"\0", b"\1")
    if not sample:
        return True
    odd = sum(sample.count(byte) for byte in (bytes([code]) for code in (*range(1, 7), *range(14, 27), 127)))
    if odd > len(sample) * 0.05:
        return False
    undecodable = sample.decode("utf-8", errors="replace").count("�")
    return undecodable < len(sample) * (1 - _LEAST_PRINTABLE)
