"""Read logs: skip lines that show no failure, and split off prefixes, times and records that loggers add."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from ..plain_text import TERMINAL_CODES
from .signatures import any_of, expand, read_signatures, read_toml

_MOST_REPEATS = 12  # lines that differ only in their digits are kept this often
_MOST_RANK_LINES = 4000  # lines that say which process has which rank are kept this often
_MOST_NEEDED = 2000  # lines of tracebacks are kept this often
_MOST_SHAPES = 20_000
_MANY = 8000  # kept lines from which on a line needs a word that few lines since then had
_MOST_OF_A_WORD = 20
_DIGITS = b"0123456789"


class LineFilter:
    """Decides line by line for one file. It counts the lines it has seen, so that it can drop repetitions.

    The shape of a line is the line without its digits. `worn` are the hashes of the shapes that were seen too often:
    no line of such a shape is kept.
    """

    def __init__(self) -> None:
        self.worn: set[int] = set()
        self._counts: Counter[int] = Counter()
        self._needed: Counter[int] = Counter()
        self._words: Counter[bytes] = Counter()
        self._kept = 0

    def keeps(self, line: bytes, shape: int | None = None, *, needed: bool = False) -> bool:
        """Whether the line has a word that some row looks for and is no repetition. `shape` is its shape's hash.

        Lines that differ only in their digits are repetitions. After `_MANY` kept lines a line needs a word that few
        lines since then had. A line that is `needed` may be any, and a repetition more often.
        """
        if len(self._counts) + len(self._needed) > _MOST_SHAPES:
            self._counts.clear()
            self._needed.clear()
            self.worn.clear()
        shape = hash(line.translate(None, _DIGITS)) if shape is None else shape
        if needed:
            self._needed[shape] += 1
            return self._needed[shape] <= _MOST_NEEDED
        self._counts[shape] += 1
        lowered = line.lower()
        if self._counts[shape] > (_MOST_RANK_LINES if b"pid" in lowered and b"rank" in lowered else _MOST_REPEATS):
            self.worn.add(shape)
            return False
        if self._kept < _MANY:
            keep = _telling_words().search(lowered) is not None
        else:
            words = set(_telling_words().findall(lowered))
            self._words.update(words)
            keep = any(self._words[word] <= _MOST_OF_A_WORD for word in words)
        self._kept += keep
        return keep


@cache
def _telling_words() -> re.Pattern[bytes]:
    words = {word for row in read_signatures() for word in (*row.phrases, *row.words)}
    return re.compile(any_of(words.union(read_toml("fragments")["telling_word"])).encode())


_DATE = r"\d{4}[-/]\d\d[-/]\d\d[ T_-]|\d\d[-/]\d\d(?:[-/]\d{2,4})? |[A-Z][a-z]{2} [ \d]\d |(?<=[DIWEF])\d{4} "
_TIME_OF_LINE = re.compile(rf"(?:(?<!\d)(?:{_DATE}))?(?<![\d:])\d\d:\d\d:\d\d(?:[.,]\d+)?")
_TIME_SPAN = 160  # characters at a line's start that may hold its time
_FRACTION = re.compile(r"[.,]\d+$")
Clock = tuple[str, str]  # the form of a time and its text; texts of one form compare, within a year or a month


def parse_clock(text: str) -> Clock | None:
    """The first time near the start of the text; None without one."""
    match = _TIME_OF_LINE.search(text[:_TIME_SPAN])
    if match is None:
        return None
    time = match[0].replace("T", " ")
    return re.sub(r"[\w ]", "0", _FRACTION.sub("", time)), time


Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The parts of a line's prefix. Lines with the same stream come from one process, as far as the log shows."""

    stream: str = ""
    rank: int | None = None
    level: Level | None = None
    has_time: bool = False


_LEVELS: dict[str, Level] = {
    "d": "debug", "debug": "debug", "trace": "debug", "i": "info", "info": "info", "notice": "info",
    "w": "warning", "warn": "warning", "warning": "warning",
    "e": "error", "error": "error", "err": "error", "c": "error", "critical": "error", "f": "error", "fatal": "error",
    "severe": "error", "exception": "error",
}  # fmt: skip
_PREFIXES = tuple(re.compile(expand(pattern)) for pattern in read_toml("log_lines")["prefixes"])
_MOST_PREFIXES = 7
_WIDEST_MARGIN = 40  # of a log in an indented block
_GROUP_MARGIN = re.compile(
    r"^ {2,}(?:\||\+[-+]{4,}(?: (?:\d+|\.{3}) -+)?$|\+(?= Exception Group)) ?"
)  # of ExceptionGroup's parts


def split_prefix(text: str) -> tuple[Prefix, str]:
    """Split a line into its prefix and the rest, which keeps its indentation."""
    rest = text
    parts: list[tuple[str, str]] = []
    is_code = text.startswith("   ") and "[rank" not in text[:_WIDEST_MARGIN]  # or a frame of a traceback
    for _ in range(0 if is_code else _MOST_PREFIXES):
        match = next((match for pattern in _PREFIXES if (match := pattern.match(rest))), None)
        if match is None or not match[0]:
            break
        parts += ((name, value) for name, value in match.groupdict().items() if value is not None)
        rest = rest[match.end() :]
    rest = _GROUP_MARGIN.sub("", rest, count=1) if rest.startswith("  ") else rest
    first, last = dict(reversed(parts)), dict(parts)
    prefix = Prefix(
        stream=" ".join({"rank": "rank "}.get(name, "") + value for name, value in parts if name in ("rank", "stream")),
        rank=int(last["rank"]) if "rank" in last else None,
        level=_LEVELS[first["level"].lower()] if "level" in first else None,
        has_time="time" in first,
    )
    return prefix, rest


def join_prefixes(outer: Prefix, inner: Prefix) -> Prefix:
    """The prefix of a line and that of the record inside it as one."""
    return Prefix(
        stream=f"{outer.stream} {inner.stream}".strip(),
        rank=inner.rank if inner.rank is not None else outer.rank,
        level=inner.level or outer.level,
        has_time=outer.has_time or inner.has_time,
    )


_TEXT = ("message", "msg", "log", "event", "MESSAGE", "textPayload", "body", "text")
_RANK = ("rank", "global_rank", "world_rank", "process_rank", "RANK", "worker_rank", "rank_id")
_LEVEL_FIELDS = ("level", "levelname", "severity", "lvl", "log_level", "levelName")
_TIME = ("time", "ts", "timestamp", "@timestamp", "asctime", "datetime", "created")
_STREAM = ("pod", "pod_name", "container", "hostname", "host", "node", "worker", "process", "pid", "stream")
_LONGEST_RECORD = 1 << 16
_DEEPEST_RECORD = 6
_FAILED = re.compile(r"Traceback \(most recent call last\)|^\s*(?:[\w.]+(?:Error|Exception)): ", re.MULTILINE)
_LOGFMT = re.compile(r'(?:[\w.@-]+=(?:"(?:[^"\\]|\\.)*"|\S*) *){2,}$')
_PAIR = re.compile(r'([\w.@-]+)=("(?:[^"\\]|\\.)*"|\S*)')


def parse_record(text: str) -> tuple[Prefix, list[str]] | None:
    """The prefix and the lines of a structured record; None for plain text, and for data without a message."""
    fields = _fields(text)
    if fields is None:
        return None
    if fields.get("OOMKilled") is True:  # docker's state of a container
        return Prefix(), [f"OOMKilled, exit code: {fields.get('ExitCode', 137)}"]
    text_field = _first(fields, _TEXT)
    if isinstance(reason := fields.get("reason"), str) and "exitCode" in fields:  # a container's last state
        text_field = f"reason: {reason}, exit code: {fields['exitCode']}"
    texts = [value for value in fields.values() if isinstance(value, str) and value != text_field]
    parts = [*([text_field] if isinstance(text_field, str) else []), *filter(_FAILED.search, texts)]
    is_log_record = any(name in fields for name in (*_LEVEL_FIELDS, *_TIME, *_RANK, *_STREAM, "exitCode"))
    if not is_log_record or not parts:
        return None
    first, *rest = (line for part in parts for line in part.splitlines())
    line_prefix, first = split_prefix(first)
    rank = _first(fields, _RANK)
    stream = [str(fields[name]) for name in _STREAM if isinstance(fields.get(name), str | int)]
    prefix = Prefix(
        stream="/".join(stream) if rank is None else f"{'/'.join(stream)} rank {rank}",
        rank=int(rank) if str(rank).isdecimal() else None,
        level=_LEVELS.get(str(_first(fields, _LEVEL_FIELDS)).lower()),
        has_time=_first(fields, _TIME) is not None,
    )
    return join_prefixes(prefix, line_prefix), [first, *rest]


def _fields(text: str) -> Mapping[str, Any] | None:
    text = text.strip()
    if len(text) > _LONGEST_RECORD:
        return None
    if text.startswith('{"') and text.endswith("}"):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return _flat(data) if isinstance(data, dict) else None
    if "msg=" in text and _LOGFMT.match(text):
        return {name: value.strip('"').replace('\\"', '"').replace("\\n", "\n") for name, value in _PAIR.findall(text)}
    return None


def _flat(data: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Merge nested objects (`record`, `extra`, torchrun's `message`) into one; outer names win.

    A list counts by the states of containers alone: the first that failed stands for it.
    """
    flat = {name: value for name, value in data.items() if not isinstance(value, dict)}
    for value in data.values() if depth < _DEEPEST_RECORD else ():
        if isinstance(value, dict):
            flat = {**_flat(value, depth + 1), **flat}
        elif isinstance(value, list):
            inner = [_flat(each, depth + 1) for each in value if isinstance(each, dict)]
            states = sorted((each for each in inner if "exitCode" in each), key=lambda state: not state["exitCode"])
            flat = {**(states[0] if states else {}), **flat}
    return flat


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if name in fields and fields[name] not in (None, "")), None)


BLOCK_BYTES = 1 << 20
LINE_CHARS = 4000  # kept of a longer line: its beginning and its end
_UNBROKEN_BYTES = 1 << 16  # a line without an end is cut here
_MANY_PARTS = 40  # in one line: progress bars without line ends
_BACK_LINES = 200  # searched backwards for a line's time
_WATCH_LINES = 3000  # after a failure, in which training progress is counted
# In a pasted log the escape character of a colour is often missing, or written out.
_CODES = re.compile(
    rf"{TERMINAL_CODES}|(?:\^\[|#033|\\(?:x1b|u001b|033|e))\[[0-9;]*m|\[(?:[01]?\d;)?(?:[014]|22|[39]\d|38;5;\d+)m"
)
PROGRESS = re.compile(
    r"(?:\bsteps?|\biter(?:ation)?s?|global_step|\bepochs?|num_updates)\W{0,6}(\d+)|(?<!\d)(\d+)/\d+ ?\[\d"
    r"|\bloss['\"]?\s*[:=]\s*\d|\d\s?(?:it/s|s/it)\b",
    re.IGNORECASE,
)
# tqdm's: 5/10 [00:02<00:02, lr=[0.1], loss=2]. Without limits, a line of hexadecimal digits takes minutes.
_BAR = re.compile(r"\d\w{0,20}(?:/\S{1,20})? \[\d+:\d\d[^\n]{0,300}?\](?![,\]'\"])")
# The header of one file in a log that joins several, as `tail -n 50 *.log` writes it.
_HEADER = re.compile(
    rb"(?:={2,}>?|#{2,}|-{2,}|\*{2,}|>{2,})\s*(?:(?:file|log|output of|contents? of|stderr of|stdout of):? )?"
    rb"([^\s=]*?(?:(?:rank|worker|node|proc|task|trainer|gpu)[-_ ]?\d+[^\s=]*"
    rb"|[^\s=]+\.(?:log|out|err|txt|stderr|stdout)))\s*:?\s*"
    rb"(?:<?={2,}|#{2,}|-{2,}|\*{2,}|<{2,})?\s*$",
    re.IGNORECASE,
)
_HOST_MEMORY = b"CPU Virtual Memory"
_LOADING = re.compile(read_toml("log_lines")["loading"].encode())
_SAVING = re.compile(read_toml("log_lines")["saving"].encode())
# A loss of training as loggers and progress bars print it. The Trainer logs 0.0 for one that is no number, and '0' from
# transformers 5 on.
_NAN_GRADIENT = rb"(?=[^\n]{0,60}grad_norm['\"]?: ['\"]?nan)"
_LOSS = re.compile(
    rb"(?:\b|train_)loss['\"]?\s*[:=]\s*['\"]?(?:tensor\()?"
    rb"(?:(?P<no_number>-?(?:nan|inf)\b|0(?:\.0)?\b(?![.\d])%b)|(?P<no_gradient>[-+.\d]%b)|[-+.\d])"
    % (_NAN_GRADIENT, _NAN_GRADIENT),
    re.IGNORECASE,
)
_NAN_GRADIENTS = 3  # in a row: fp16 skips single steps whose gradient is no number
_LOSS_BYTES = 1 << 16  # of a block, at its end, in which the last loss is looked for
_SUMMARY = b"train_runtime"  # the Trainer's last line, whose loss is the mean of all steps
_HEADS = (b"==", b"##", b"--", b"**", b">>")
_LONGEST_HEADER = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its prefix. `progress` counts the training steps in its file since the first failure."""

    file: str
    number: int
    text: str
    prefix: Prefix
    progress: int = 0


class Reader:
    """Yields the lines of one file that may tell something. While `waiting()` is true, a traceback needs all lines."""

    def __init__(self, file: str, waiting: Callable[[], bool] = lambda: False) -> None:
        self.file, self.waiting = file, waiting
        self.number = 0
        self.bytes = 0
        self.progress = 0
        self.parts: dict[str, int] = {}  # name → progress, in a log that joins several files
        self.last: list[str] = []  # of the last block
        self.doing: tuple[str, str] | None = None  # the phase in which the file ends, load or checkpoint, and its line
        self.host_memory = ""  # the last line in which DeepSpeed says how full it is; it writes many alike
        self.diverged = ""  # the last line with a loss; "" where that is a number
        self._name = file
        self._raws: list[bytes] = []
        self._first = 0
        self._watch_until = -1
        self._last_step = ""
        self._indent = ""  # of all lines: the log stands in an indented block
        self._filter = LineFilter()

    def read(self, blocks: Iterable[bytes]) -> Iterator[Line]:
        """The lines in order. `blocks` are the file's bytes (UTF-8) in pieces of any size."""
        rest = b""
        for block in blocks:
            self.bytes += len(block)
            if self.number == 0 and not rest:
                self._indent = _common_indent(block)
            whole, newline, rest = (rest + block.replace(b"\0", b"")).rpartition(b"\n")
            if newline:
                yield from self._read_block(whole + newline)
            while len(rest) > _UNBROKEN_BYTES:
                cut, rest = rest[:_UNBROKEN_BYTES], rest[_UNBROKEN_BYTES:]
                yield from self._read_block(cut)
        if rest:
            yield from self._read_block(rest + b"\n")

    def watch(self) -> None:
        """Count the progress that follows: a run that trains on has survived the failure."""
        self._watch_until = self.number + _WATCH_LINES

    def when(self, number: int) -> Clock | None:
        """The time of a line that was just read, or of the last line before it with a time."""
        here = number - self._first
        raws = reversed(self._raws[max(0, here - _BACK_LINES) : here])
        clocks = (parse_clock(raw[: 2 * _TIME_SPAN].decode(errors="replace")) for raw in raws)
        return next(filter(None, clocks), None)

    def _read_block(self, block: bytes) -> Iterator[Line]:
        """Read whole lines, or a piece of a line without its end."""
        self.last = [text for text in _clean(block[-2000:]).splitlines() if text.strip()][-5:] or self.last
        if (place := block.rfind(_HOST_MEMORY)) >= 0:
            self.host_memory = _clean(block[place : place + 100]).splitlines()[0]
        tail = max(0, len(block) - _LOSS_BYTES)
        if losses := [loss for loss in _LOSS.finditer(block, tail) if not _is_a_mean(loss, block)]:
            self.diverged = _read_line_of(losses[-1], block) if _have_diverged(losses) else ""
        if marks := [*_LOADING.finditer(block), *_SAVING.finditer(block, tail)]:
            self.doing = _find_activity(max(marks, key=re.Match.end), block)
        block, line_end = block.removesuffix(b"\n"), block[-1:] == b"\n"
        self._raws, self._first = block.split(b"\n"), self.number
        shapes = map(hash, block.translate(None, _DIGITS).split(b"\n"))
        worn, needs_all = self._filter.worn, True
        for number, (raw, shape) in enumerate(zip(self._raws, shapes, strict=True), self.number + 1):
            if shape in worn and not needs_all:
                continue
            self.number = number
            if raw[:2] in _HEADS and len(raw) <= _LONGEST_HEADER and (header := _HEADER.match(raw)):
                self._begin_part(header[1].decode(errors="replace"))
                continue
            keeps = self._filter.keeps(raw, shape, needed=self.waiting())
            if number < self._watch_until:
                self._count_progress(raw)
            if keeps:
                yield from self._parse(raw)
            if keeps or needs_all:  # only a kept line opens a message, or is a failure
                needs_all = self.waiting() or number < self._watch_until
        self.number = self._first + len(self._raws) - (not line_end)

    def _begin_part(self, name: str) -> None:
        """The next lines belong to another file."""
        self.parts[self.file] = self.progress
        self.file = f"{self._name}/{name}" if self._name else name
        self.progress, self._last_step = self.parts.get(self.file, 0), ""

    def _count_progress(self, raw: bytes) -> None:
        if match := PROGRESS.search(raw.decode(errors="replace")):
            step = match[1] or match[2] or ""
            if not step or step != self._last_step:  # the same step on eight ranks counts once
                self.progress += 1
                self._last_step = step

    def _parse(self, raw: bytes) -> Iterator[Line]:
        parts = _split(_clean(raw).removeprefix(self._indent))
        for text in parts:
            is_part = len(parts) > _MANY_PARTS
            if is_part and not self._filter.keeps(text.encode(errors="replace"), needed=self.waiting()):
                continue
            prefix, rest = split_prefix(text)
            bar = _BAR.search(rest)
            if bar and (after_bar := rest[bar.end() :].strip()):  # written after a bar that has no line end
                inner, rest = split_prefix(after_bar)
                prefix = join_prefixes(prefix, inner)
            if (rest[:2] == '{"' or "msg=" in rest) and (record := parse_record(rest)):
                prefix = join_prefixes(prefix, record[0])
                for line in record[1]:
                    yield Line(self.file, self.number, line, prefix, self.progress)
                    prefix = replace(prefix, has_time=False, level=None)  # the lines of a record belong together
                continue
            if len(rest) > LINE_CHARS:
                rest = f"{rest[: LINE_CHARS // 2]} … {rest[-LINE_CHARS // 2 :]}"
            yield Line(self.file, self.number, rest, prefix, self.progress)


def _common_indent(block: bytes) -> str:
    indents = {line[: len(line) - len(line.lstrip())] for line in block.split(b"\n") if line.strip()}
    shortest = min(indents, key=len, default=b"")
    return shortest.decode() if all(indent.startswith(shortest) for indent in indents) else ""


def _is_a_mean(loss: re.Match[bytes], block: bytes) -> bool:
    """Whether the loss is the number of a summary, which says nothing about the last step."""
    start = block.rfind(b"\n", 0, loss.start()) + 1
    return not loss["no_number"] and _SUMMARY in block[start : loss.start()]


def _have_diverged(losses: Sequence[re.Match[bytes]]) -> bool:
    """Whether the last loss is no number, or the last gradients are none."""
    skipped = sum(1 for loss in losses[-_NAN_GRADIENTS:] if loss["no_gradient"])
    return bool(losses[-1]["no_number"]) or skipped == _NAN_GRADIENTS


def _find_activity(mark: re.Match[bytes], block: bytes) -> tuple[str, str] | None:
    """The phase that begins with a mark of loading or saving, and the line of the mark; None if one ends there."""
    groups = mark.groupdict()
    if int(groups.get("percent") or 100) < 100:
        return "load", _clean(mark[0])
    return ("checkpoint", _read_line_of(mark, block)) if groups.get("saving") else None


def _read_line_of(match: re.Match[bytes], block: bytes) -> str:
    """The line in which the match is; a piece of it where it is long."""
    start = max(block.rfind(end, 0, match.start()) for end in (b"\n", b"\r")) + 1
    return _clean(block[start : match.end() + LINE_CHARS]).splitlines()[0].strip()


def _clean(raw: bytes) -> str:
    return _CODES.sub("", raw.decode("utf-8", errors="replace"))


def _split(text: str) -> list[str]:
    """Split at carriage returns (progress bars), and at line ends that a JSON log wrote as backslash and n."""
    parts = [part for part in text.split("\r") if part.strip()] if "\r" in text else [text]
    is_record = len(parts) == 1 and text.rstrip().endswith("}")
    if "#012" in text and "Traceback (most" in text:  # syslog's line ends
        return text.split("#012")
    if "\\n" in text and not is_record and ("Traceback (most" in text or len(text) > LINE_CHARS):
        parts = [piece for part in parts for piece in part.split("\\n")]
    return parts
