"""Group the lines of a log into messages: tracebacks, exceptions, native crashes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .lines import PROGRESS, Line, Prefix
from .signatures import expand

# A message is raised at the end of a traceback, stated by a line that reports a failure itself, mentioned by a line
# below level ERROR, or quoted in data, arguments or generated text.
Manner = Literal["raised", "stated", "mentioned", "quoted"]
TRACEBACK = re.compile(r"(?:Original |Remote )?Traceback \(most recent call last\)")
FRAME = re.compile(r"\s*File \"[^\"]+\", line \d+, in \S+")
BOXED_FRAME = re.compile(r"[│|] (?:\S+\.py:\d+(?: in\b|\s*[│|]?$)|❱)")  # rich's
IPYTHON_FRAME = re.compile(r"Cell In ?\[\d+\], line \d+|File \S+\.py:\d+, in |-+> \d+ ")
# NumPy warns of a module for another NumPy with a stack whose first frame is in the header's line: nothing was raised.
_WARNING_OF_NUMPY = re.compile(r"A module that was compiled using NumPy 1\.x")
_STACK_OF_WARNING = re.compile(r":\s*File \"")
_FOLDED_FRAME = re.compile(r"(?=File \"[^\"]+\", line \d+)")
_FOLDED_PLACE = re.compile(r"File \"[^\"]+\", line \d+(?:, in \S+)?")
_FOLDED_END = re.compile(expand(r"(?<!\w)(?<!\w\.)(?:\w+\.)*[A-Z]\w*{exception_suffix}: .*"))
HANDLING = re.compile(r"During handling of the above exception, another exception occurred:")
IGNORED = re.compile(r"Exception ignored in|Error in atexit|Error in sys\.excepthook|Exception in thread .*daemon")
# "torch.OutOfMemoryError: CUDA out of memory…", "RayTaskError(OutOfMemoryError): …", pytest's "E   ValueError: …".
EXCEPTION = re.compile(
    expand(
        r"(?:E +|\.)?(?:Uncaught (?:exception|error):? )?"
        r"(?P<type>(?:[A-Za-z_][\w]*(?:\.|::))*[A-Za-z_]*{exception_suffix}(?:Group)?"
        r"(?:\([\w., ]+\))?)(?::(?=\s|$)|$|(?=\(['\"].*['\"],?\)$))(?P<text>.*)"
    )
)
ENDS_TRACEBACK = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w., ]+\))?)(?::(?=\s|$)|$)(?P<text>.*)")
NATIVE = re.compile(r"terminate called|(?:\s+)?what\(\):|Fatal Python error|\*\*\* Process received signal")
_CODE = re.compile(expand(r"(?:>+ *\d* *)?{source_code}"))
BOX = "│╭╰┌└├|❱"
NATIVE_FRAME = re.compile(r"#?\s*(?:frame )?#\d+:? |C\+\+ CapturedTraceback|Exception raised from .* \(most recent")
REPORTS_FAILURE = re.compile(
    r"(?:[\w./-]+: (?=error:|(?-i:ERROR|FATAL) )|(?:[\w./-]+ ){1,2}(?=(?-i:ERROR|FATAL): )|(?:CUDA|HIP) (?=error:))?"
    r"\b(?:error|errors|exception|fail(?:ed|ure|s)?|fatal|critical|abort(?:ed|ing)?|crash(?:ed)?|panic)\b",
    re.I,
)
# Data that a program prints: a field's name near the line's beginning, or inside an object. Also a command's options.
_QUOTED = re.compile(
    expand(
        r"^[^:=(]{0,24}?(?<![\w-]){printed_field}s?(?: ?#?\d+)?['\"]?\s?[:=(]"
        r"|^\W{0,3}[QA]\d*\s?[:=]"
        r"|[{,(]\s*['\"](?:prompt|text|content|output|answer|response|question|sample|completion|label)['\"]\s*:"
        r"|\bNamespace\("
        r"|:\s*[{\[]['\"]"
        r"|^\s*[{\[]['\"]"
        r"|^\s*--?\w[\w-]*(?:[ =]|$)"
        r"|^(?:.*[$#>+] )?(?:\S*/)?(?:python[\d.]*|deepspeed|torchrun|accelerate|srun|mpirun)\s(?!.*\berror\b).* --?\w"
    ),
    re.IGNORECASE,
)
# A cloud's or a cluster's notice, and a trainer's last one, as their dicts name the fields.
_NOTICE = re.compile(
    r"['\"](?:EventType|eventType|EventStatus|instance-action|involvedObject|terminationReason|train_runtime)['\"]\s*:"
)
# Advice that torch adds to every CUDA error; it names things that did not happen.
BOILERPLATE = re.compile(expand(r"\s*{torch_advice}"))
RAY_PID = re.compile(r"\(pid=(\d+)")
ANNOUNCES = re.compile(
    r"(?:raised|(?:following|original|inner|underlying) (?:error|exception)\w*|caused by|exception was|failed with)"
    r"\W{0,3}:\s*$",
    re.I,
)
OF_NCCL = re.compile(r"nccl\w+Error: ")  # the second line of torch's DistBackendError
STARTS_ANEW = re.compile(expand("{starts_anew}"))


def parse_exception_type(text: str) -> str:
    """'OutOfMemoryError' for "torch.OutOfMemoryError: CUDA …"; empty when the text does not begin with an exception."""
    return _type_name(EXCEPTION.match(text))


def _type_name(match: re.Match[str] | None) -> str:
    return match["type"].replace("::", ".").rpartition(".")[2] if match else ""


def _unfold(text: str) -> list[str]:
    """The lines of a traceback that a logger has folded into one line; empty for another line."""
    rest = text.partition("(most recent call last):")[2]
    frames = [frame.strip() for frame in _FOLDED_FRAME.split(rest) if frame.startswith('File "')]
    place = _FOLDED_PLACE.match(frames[-1]) if frames else None
    end = _FOLDED_END.search(frames[-1], place.end()) if place is not None else None
    if place is None or end is None:
        return []
    calls = (line for frame in frames[:-1] for line in _split_frame(frame))
    text = frames[-1][place.end() : end.start()].strip()
    code = [f"    {text}"] if text else []
    return ["Traceback (most recent call last):", *calls, f"  {place[0]}", *code, end[0]]


def _split_frame(frame: str) -> list[str]:
    match = FRAME.match(frame)
    if match is None:
        return [f"  {frame}"]
    code = frame[match.end() :].strip()
    return [f"  {match[0]}", *([f"    {code}"] if code else [])]


def _is_code(text: str) -> bool:
    """Whether the line is source code or a frame in a traceback."""
    text = text.strip()
    return bool(_CODE.match(text)) or text[:1] in BOX or bool(NATIVE_FRAME.match(text)) or text.startswith('File "')


# What the user's own code says: the innermost frame is in a file of the user's and raises.
_FILE = re.compile(
    r"File \"([^\"]+)\", line \d+|File (\S+\.py):\d+, in |(Cell In ?\[\d+\]), line \d+"
    r"|[│|]\s*(\S+\.py):\d+(?: in\b|\s*[│|]?$)"
)
_MARKED_LINE = re.compile(r"-+> \d+|[│|]?\s*❱")  # by IPython, by rich
_LIBRARY_FILE = re.compile(expand("{library_file}"))
_RAISES = re.compile(expand("{raising_statement}"), re.MULTILINE)
_PASSED_ON = re.compile(expand("{passed_on}"))
# Python itself raises these where the user's code is wrong. Their message quotes the user's names, keys and values.
_OF_PYTHON = (
    "KeyError", "NameError", "UnboundLocalError", "ZeroDivisionError", "IndexError", "RecursionError",
    "UnicodeDecodeError", "StopIteration",
)  # fmt: skip
_PYTHON_SAYS = re.compile(
    r"\w+: (?:invalid literal for|could not convert string|(?:not enough|too many) values to unpack|.* is not in list"
    r"|.* is not a valid \w+$|unhashable type|unsupported operand|'\w+' object (?:is not|does not)"
    r"|'(?:NoneType|dict|list|str|int|float|tuple)' object has no attribute)"
)
# Where a log has no source lines, the user's innermost frame raised these rather than a library in C that it called.
_RAISED_BY_SCRIPTS = ("ValueError", "TypeError", "AssertionError", "NotImplementedError", "LookupError")

_MOST_FRAMES = 120
_MOST_BODY_LINES = 25
_MOST_OPEN_LINES = 600  # a traceback that has not ended after so many lines is none
CUT = "a traceback without its end"


@dataclass(slots=True)
class Message:
    """One message of a process. `text` is the exception with its message, or the line."""

    file: str
    number: int
    text: str
    prefix: Prefix
    manner: Manner
    type: str = ""  # the exception's name without its module
    frames: tuple[str, ...] = ()  # outermost first: 'File "…", line 3, in forward', and the code under it
    progress: int = 0
    order: int = 0  # its line's number, counted through all files
    ignored: bool = False  # Python reports that it ignored this exception
    pid: int | None = None  # of the Ray worker that raised it
    handled: str = ""  # the first exception of the chain, while whose handling this one was raised

    @property
    def stack(self) -> str:
        """The frames as one text, with slashes in the paths of every system."""
        return "\n".join(self.frames).replace("\\", "/")

    @property
    def user_frame(self) -> str | None:
        """The innermost frame in a file that is no library's: 'File "train.py", line 3, in forward'."""
        files = ((frame, _FILE.match(frame)) for frame in reversed(self.frames))
        return next((frame for frame, match in files if match and not _is_of_library(match)), None)

    @property
    def by_user(self) -> bool:
        """Whether the text is the user's own: a file of theirs raises it, and it passes on nothing of a library's."""
        if not self.type or not self.frames or _PASSED_ON.search(self.text):
            return False
        places = [(number, match) for number, frame in enumerate(self.frames) if (match := _FILE.match(frame))]
        if not places:
            return False
        number, match = places[-1]
        if _is_of_library(match):
            return False
        lines = self.frames[number + 1 :]
        marked = [line for line in lines if _MARKED_LINE.match(line)]  # the others are lines around it
        code = "\n".join(marked or lines)
        if not code and self.type in _RAISED_BY_SCRIPTS:
            return True
        return self.type in _OF_PYTHON or bool(_PYTHON_SAYS.match(self.text) or _RAISES.search(code))


def _is_of_library(file: re.Match[str]) -> bool:
    return _LIBRARY_FILE.search(next(filter(None, file.groups())).replace("\\", "/")) is not None


@dataclass(slots=True)
class _Open:
    """The unfinished message of one stream."""

    first: Line  # reported when the end of a traceback is missing
    frames: list[str] = field(default_factory=list)
    lines: int = 0
    message: Message | None = None
    body: list[str] = field(default_factory=list)
    ignored: bool = False
    indent: int = 0  # of the first frame
    margin: re.Pattern[str] | None = None  # what stands before the header, and so before each line
    type: str = ""  # of the exception, which a notebook writes before the header, too
    remote: list[str] = field(default_factory=list)  # frames of another process that the message quotes
    handled: str = ""


Key = tuple[str, str]  # the file and the stream of a process


class Assembler:
    """Assembles messages from lines. Each stream has its own state, so that interleaved ranks do not mix."""

    def __init__(self) -> None:
        self._open: dict[Key, _Open] = {}
        self._ignore: set[Key] = set()
        self._numpy_warned = False
        self._raised_in: dict[Key, int] = {}  # stream → process id, as Ray reports it
        self._raised: dict[Key, Message] = {}  # the last exception of a stream
        self._handled: dict[Key, str] = {}  # what is handled while the next exception of a stream is raised

    @property
    def waiting(self) -> bool:
        """Whether some stream has an unfinished message."""
        return bool(self._open)

    def feed(self, line: Line) -> Iterator[Message]:
        """The messages that this line completes."""
        key = (line.file, line.prefix.stream)
        opened = self._open.get(key)
        if opened is not None and opened.margin and (cut := opened.margin.match(line.text)):
            line = replace(line, text=line.text[cut.end() :])
        text = line.text
        if header := TRACEBACK.search(text):
            yield from self._close(key)
            if folded := _unfold(text):
                for piece in folded:
                    yield from self.feed(replace(line, text=piece))
                yield from self._close(key)
                return
            before = text[: header.start()]
            margin = _margin(before) or (opened.margin if opened is not None else None)
            named = parse_exception_type(before.strip())
            handled = self._handled.pop(key, "")
            is_of_warning = self._numpy_warned and _STACK_OF_WARNING.match(text, header.end()) is not None
            ignored = is_of_warning or key in self._ignore
            self._open[key] = _Open(line, ignored=ignored, margin=margin, type=named, handled=handled)
            self._ignore.discard(key)
            return
        self._numpy_warned = self._numpy_warned or _WARNING_OF_NUMPY.match(text) is not None
        if IGNORED.search(text):
            self._ignore.add(key)
            if opened is None or opened.message is not None:
                yield from self._close(key)
                return
        if opened is None and (FRAME.match(text) or BOXED_FRAME.match(text)):  # the traceback's beginning is missing
            self._open[key] = _Open(line, frames=[text.strip()], indent=_indent(text))
        elif opened is not None and opened.message is None:
            yield from self._add_frame(key, opened, line)
        elif opened is None or opened.message is None or not self._continues(opened, opened.message, line):
            remote = opened.remote if opened is not None else []
            yield from self._close(key)
            match = EXCEPTION.match(text)
            if match and (match["type"].endswith("Warning") or _is_code(text)):
                match = None
            if match or NATIVE.match(text):
                self._open[key] = _Open(line, message=_message(line, "stated", match, remote), body=[text.rstrip()])
            else:
                if HANDLING.match(text) and (earlier := self._raised.get(key)) is not None:
                    self._handled[key] = earlier.handled or earlier.text.partition("\n")[0]
                yield from _single_line(line)

    def finish(self) -> Iterator[Message]:
        """The messages that are still open at the end."""
        for key, opened in list(self._open.items()):
            if opened.message is None and opened.frames and not opened.ignored:
                name = EXCEPTION.fullmatch(opened.frames[-1])  # it is indented as a frame's code
                end = opened.frames.pop() if name and len(opened.frames) > 1 else opened.type
                opened.message = _message(opened.first, "stated", EXCEPTION.match(end), opened.frames)
                opened.body = [end or f"{CUT}: {opened.frames[-1]}"]
            yield from self._close(key)

    def _add_frame(self, key: Key, opened: _Open, line: Line) -> Iterator[Message]:
        """Add a line to the frames of a traceback, or begin its message with the line that names the exception."""
        text, stripped = line.text.rstrip(), line.text.strip()
        opened.lines += 1
        outdented = bool(opened.frames) and _indent(text) < opened.indent
        # Without any indent, the line after a frame is its code.
        is_code = bool(opened.frames) and not opened.indent and FRAME.match(opened.frames[-1]) is not None
        if opened.lines > _MOST_OPEN_LINES:
            del self._open[key]
        elif outdented and (match := EXCEPTION.match(stripped)):
            opened.message = _message(line, "raised", match, opened.frames)
            opened.message.ignored = opened.ignored
            opened.body = [stripped]
        elif (
            not stripped
            or text[0] in " \t" + BOX
            or FRAME.match(text)
            or IPYTHON_FRAME.match(text)
            or (is_code and not EXCEPTION.match(text))
        ):
            if not opened.frames:
                opened.indent = _indent(text)
            if len(opened.frames) > _MOST_FRAMES:
                del opened.frames[_MOST_FRAMES // 3]
            if stripped:
                opened.frames.append(stripped)
        elif match := EXCEPTION.match(text) or (ENDS_TRACEBACK.match(text) if opened.frames else None):
            opened.message = _message(line, "raised", match, opened.frames)
            opened.message.ignored = opened.ignored
            opened.body = [text]
        else:
            yield from _single_line(line)  # another process wrote in between

    def _continues(self, opened: _Open, message: Message, line: Line) -> bool:
        """Whether the line belongs to the open message, whose text may have several lines; if so, it is added."""
        text, prefix = line.text, line.prefix
        # "BackendCompilerFailed: backend='inductor' raised:" announces the exception in the next line.
        if ANNOUNCES.search(opened.body[-1]) and (inner := EXCEPTION.match(text)):
            message.type = _type_name(inner)
            opened.body.append(text.rstrip())
            return True
        if len(opened.body) >= _MOST_BODY_LINES:
            return False
        if prefix.level or prefix.has_time:  # every line here may have one, and the text so far ends with a colon
            alike = message.prefix.has_time == prefix.has_time and message.prefix.level == prefix.level
            if not (alike and opened.frames and opened.body[-1].rstrip().endswith(":")):
                return False
        if not text.strip():
            belongs = opened.body[-1].endswith(":") or (bool(opened.frames) and len(opened.body) < 3)
        else:
            others = (EXCEPTION.match, STARTS_ANEW.match, PROGRESS.search)
            belongs = OF_NCCL.match(text) is not None or not any(other(text) for other in others)
        if belongs and NATIVE_FRAME.match(text):
            message.frames += (text.strip(),)
        elif belongs and not _is_code(text) and not BOILERPLATE.match(text):  # code: a remote traceback in the message
            opened.body.append(text.rstrip())
        elif belongs and not BOILERPLATE.match(text):
            opened.remote.append(text.strip())
        return belongs

    def _close(self, key: Key) -> Iterator[Message]:
        opened = self._open.pop(key, None)
        if opened is None or opened.message is None:
            return
        message = opened.message
        message.text = "\n".join(opened.body)
        if message.type.startswith("RayTaskError") and (match := RAY_PID.search(message.text)):
            self._raised_in[key] = int(match[1])
        message.pid = self._raised_in.get(key)
        message.handled = opened.handled
        if message.manner == "raised":
            self._raised[key] = message
        yield message


def _margin(before: str) -> re.Pattern[str] | None:
    """What stands before each line of a traceback, by what stands before its header; numbers in it may change."""
    pieces = re.split(r"\d+", before)
    return re.compile(r" *\d+".join(map(re.escape, pieces))) if before else None


def _message(line: Line, manner: Manner, match: re.Match[str] | None, frames: Sequence[str] = ()) -> Message:
    return Message(
        file=line.file,
        number=line.number,
        text=line.text.strip(),
        prefix=line.prefix,
        manner=manner,
        type=_type_name(match),
        frames=tuple(frames),
        progress=line.progress,
    )


def _single_line(line: Line) -> Iterator[Message]:
    """The message of a plain line: it reports a failure itself, mentions it or quotes it."""
    text, level = line.text, line.prefix.level
    if text.strip() and not _is_code(text) and not BOILERPLATE.match(text):
        manner: Manner = "mentioned" if level in ("debug", "info", "warning") else "stated"
        if _QUOTED.search(text) and level != "error" and not (REPORTS_FAILURE.match(text) or _NOTICE.search(text)):
            manner = "quoted"
        yield _message(line, manner, None)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
