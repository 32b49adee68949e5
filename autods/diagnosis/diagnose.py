"""`autods.diagnose`: why a run died, from its logs and exit code."""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import IO

from ..errors import InputError
from .exit_codes import Exits
from .messages import SAYS_SO, Assembler, Message
from .reader import BLOCK_BYTES, Reader
from .root_cause import Story, finding_of, weigh
from .rules import ERROR_LINE, first_match
from .values import Diagnosis

# They only pass on that a process of theirs failed; its own words stand elsewhere.
_LAUNCHERS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
_RANK_ID = re.compile(r"\bRankID:(\d+)\)")  # Ascend's error lines
# About memory running out, not that it did: release notes, settings, advice.
_ONLY_TALKS = re.compile(
    r"(?:previous|earlier|last) (?:run|attempt|trial|try|job|launch)\b|\bexamples? of\b|\brow \d+\b.{0,4}[\"']"
    r"|skip\w* (?:the )?(?:test|benchmark)"
    r"|^(?!.*(?:tried to allocate|killed process|errno)).*"
    r"\b(?:changelog|release notes?|fix(?:ed|es)|avoid(?:s|ed|ing)?|prevents?|preventing|known issues?|faq|how to)\b",
    re.IGNORECASE | re.DOTALL,
)
_FINDINGS = 400  # of one row: the first ones and the last one are kept
_TIMED = 40  # of one row: of so many the time is looked for
_PRINTABLE = 0.7  # less than this share of a block's bytes: not text
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
Log = str | PathLike[str] | Mapping[str, str]


def diagnose(log: Log | Iterable[PathLike[str]], exit_code: int | None = None) -> Diagnosis:
    """Why the run died that wrote `log`: its text, its path, or several (name → text, or paths), one per rank say.

    exit_code: of the run, negative for a signal or as a shell says it (137). A path is streamed, memory stays bounded.
    Raises InputError for a path that cannot be read.
    """
    if isinstance(log, str):
        return _of([("", _text_blocks(log))], exit_code)
    if isinstance(log, Mapping):
        return _of([(name, _text_blocks(text)) for name, text in log.items()], exit_code)
    paths = [Path(log)] if isinstance(log, PathLike) else [Path(path) for path in log]
    names = names_of(paths)
    return _of([(name, blocks_of(path)) for name, path in names.items()], exit_code)


def names_of(paths: Iterable[Path]) -> dict[str, Path]:
    """Every log of the given files and folders, by a short name. Raises InputError where there is none."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise InputError("no such file", where=str(path), hint="give the log of the run, or a folder of logs")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            if not inside:
                raise InputError("the folder has no files", where=str(path), hint="give the log of the run")
            found |= {str(file.relative_to(path)): file for file in inside}
        else:
            found[path.name if path.name not in found else str(path)] = path
    return found


def blocks_of(path: Path) -> Iterator[bytes]:
    """A file's text as UTF-8, in pieces. Reads gzip and UTF-16 too. Raises InputError where it cannot be read."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        opened: IO[bytes] = gzip.open(path) if zipped else path.open("rb")  # type: ignore[assignment]
        with opened as file:
            yield from _utf8(file)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", where=str(path)) from None


def _utf8(file: IO[bytes]) -> Iterator[bytes]:
    block = file.read(BLOCK_BYTES)
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace") if block[:2] in _UTF16 else None
    while block:
        yield decoder.decode(block).encode() if decoder else block
        block = file.read(BLOCK_BYTES)


def _text_blocks(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), BLOCK_BYTES):
        yield text[start : start + BLOCK_BYTES].encode(errors="replace")


def _of(logs: Iterable[tuple[str, Iterable[bytes]]], exit_code: int | None) -> Diagnosis:
    logs = list(logs)
    story, exits = Story(files=len(logs)), Exits()
    texts = 0
    for name, blocks in logs:
        texts += _read(name, blocks, story, exits)
    story.exits, story.first_exit, story.root_rank = exits.found, exits.first, exits.root_rank
    story.text = bool(texts) or not story.bytes
    return weigh(story, exit_code)


def _read(name: str, blocks: Iterable[bytes], story: Story, exits: Exits) -> bool:
    """One file into the story; whether it was text."""
    assembler = Assembler()
    reader = Reader(name, lambda: assembler.waiting)
    counts: dict[str, int] = {}
    is_text = True

    def checked() -> Iterator[bytes]:
        nonlocal is_text
        for number, block in enumerate(blocks):
            if number == 0:
                is_text = _is_text(block)
            yield block.replace(b"\0", b"") if b"\0" in block else block

    def take(messages: Iterable[Message]) -> None:
        for message in messages:
            _note(message, story, exits, counts, reader)

    for line in reader.read(checked()):
        if not is_text:
            break
        take(assembler.feed(line))
    take(assembler.finish())
    story.bytes += reader.bytes
    story.progress |= reader.ended()
    story.files += len(reader.parts)
    story.last[name] = reader.last if is_text else []
    return is_text


def _note(message: Message, story: Story, exits: Exits, counts: dict[str, int], reader: Reader) -> None:
    """Match a message against the rows; what it says of exits is kept too."""
    story.ranks.read(message)
    told = any(exits.read(line) for line in message.text.splitlines())
    if story.named_rank is None and (found := _RANK_ID.search(message.text)):
        story.named_rank = int(found[1])
    if message.manner == "quoted" or message.type in _LAUNCHERS:
        return
    says_so = message.prefix.level == "error" or SAYS_SO.match(message.text) is not None
    type = message.type or (ERROR_LINE if says_so and message.manner == "stated" else "")
    row = first_match(message.text, type=type, stack=message.stack, passing=message.manner == "mentioned")
    if row is None or (told and row.weight in ("likely", "weak") and row.file in ("user_code", "communication")):
        return
    if row.kind == "out_of_memory" and not message.type and _ONLY_TALKS.search(message.text):
        return
    counts[row.name] = counts.get(row.name, 0) + 1
    message.order = len(story.findings)
    if counts[row.name] <= _FINDINGS or row.weight == "done":
        when = reader.when(message.number) if counts[row.name] <= _TIMED else None
        finding = finding_of(row, message, story.files + len(reader.parts), when)
        if finding.rank is None and finding.local is not None:
            story.ranks.gpus.add(finding.local)
        story.findings.append(finding)
    if row.weight in ("cause", "likely"):
        reader.watch()
        message.progress = reader.progress


def _is_text(block: bytes) -> bool:
    sample = block[:65536].replace(b"\0", b"\1")
    if not sample:
        return True
    odd = sum(sample.count(byte) for byte in (bytes([code]) for code in (*range(1, 7), *range(14, 27), 127)))
    if odd > len(sample) * 0.05:
        return False
    undecodable = sample.decode("utf-8", errors="replace").count("�")
    return undecodable < len(sample) * (1 - _PRINTABLE)


__all__ = ["Diagnosis", "blocks_of", "diagnose", "names_of"]
