"""What a line is by its form: the end of a traceback, a frame, source code, data that a program prints, boilerplate."""

# ruff: noqa: E501  (tables of patterns)

from __future__ import annotations

import re
from typing import Literal

from .lines import Line

# raised: the end of a traceback. stated: a line that says so itself. mentioned: in passing, below level ERROR.
# quoted: data, arguments, generated text.
Manner = Literal["raised", "stated", "mentioned", "quoted"]

TRACEBACK = re.compile(r"(?:Original |Remote )?Traceback \(most recent call last\)")
FRAME = re.compile(r"\s*File \"[^\"]+\", line \d+, in \S+")
BOXED_FRAME = re.compile(r"[│|] (?:\S+\.py:\d+(?: in\b|\s*[│|]?$)|❱)")  # rich's
CHAINED = re.compile(r"(?:During handling of the above exception|The above exception was the direct cause)")
IGNORED = re.compile(r"Exception ignored in|Error in atexit|Error in sys\.excepthook|Exception in thread .*daemon")
_SUFFIX = (
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Fault|Failure|Abort|Abandoned|Unsupported|NotFound|Mismatch|OutOfMemory"
    r"|OutOfResources|ErrorCode|Denied|Warning)"
)
# "torch.OutOfMemoryError: CUDA out of memory…", "RayTaskError(OutOfMemoryError): …", pytest's "E   ValueError: …".
EXCEPTION = re.compile(
    r"(?:E +)?(?:Uncaught (?:exception|error):? )?(?P<type>(?:[A-Za-z_][\w]*(?:\.|::))*[A-Za-z_]*" + _SUFFIX
    + r"(?:Group)?(?:\([\w., ]+\))?)(?::(?=\s|$)|$)(?P<text>.*)"
)  # fmt: skip
ENDS_TRACEBACK = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w., ]+\))?)(?::(?=\s|$)|$)(?P<text>.*)")
NATIVE = re.compile(r"terminate called|(?:\s+)?what\(\):|Fatal Python error|\*\*\* Process received signal")
_CODE = re.compile(
    r"(?:>+ *\d* *)?(?:raise\b[^:]*\(|raise \w+$|except\b.*:\s*(?:#.*)?$|from [\w.]+ import |import [\w.]+(?: as \w+)?$|def \w+\(|class \w+.*:$"
    r"|return\b.*\)$|(?:el)?if .*:$|assert .*[,=]|self\.\w+|with .*:$|for .* in .*:$|while .*:$|try:$|#|\^+$|~+\^)"
)
BOX = "│╭╰┌└├|❱"
NATIVE_FRAME = re.compile(r"#?\s*(?:frame )?#\d+:? |C\+\+ CapturedTraceback|Exception raised from .* \(most recent")
SAYS_SO = re.compile(
    r"(?:[\w./-]+: (?=error:)|(?:[\w./-]+ ){1,2}(?=(?-i:ERROR|FATAL): ))?\b(?:error|errors|exception|fail(?:ed|ure|s)?|fatal|critical|abort(?:ed|ing)?|crash(?:ed)?|panic)\b",
    re.I,
)
# Data that a program prints: the name of a field near the line's beginning, or inside an object.
_QUOTED = re.compile(
    r"^[^:=(]{0,24}?(?<![\w-])(?:prompt|question|answer|instruction|text|content|sample|input|output|title|query|response|example|completion"
    r"|generated|prediction|predicted|reference|hypothesis|caption|summary|transcript|namespace|arguments|target|label|doc(?:ument)?|user"
    r"|assistant|human|gpt|args?|config|usage|help|pattern|tips?|notes?)s?(?: ?#?\d+)?['\"]?\s?[:=(]|^\W{0,3}[QA]\d*\s?[:=]"
    r"|[{,(]\s*['\"](?:prompt|text|content|output|answer|response|question|sample|completion|label)['\"]\s*:"
    r"|\bNamespace\(|:\s*[{\[]['\"]|^\s*[{\[]['\"]|^\s*--?\w[\w-]*(?:[ =]|$)",
    re.IGNORECASE,
)

# What torch adds to every CUDA error: advice that names things that did not happen.
BOILERPLATE = re.compile(
    r"\s*(?:Compile with `TORCH_USE|For debugging consider|CUDA kernel errors might|HIP kernel errors might|Device-side assert"
    r"ion tracking|Search for `cuda|XPU kernel errors|If reserved memory is|See documentation|To execute this test|For more i"
    r"nformation)"
)
RAY_PID = re.compile(r"\(pid=(\d+)")
SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error")
ANNOUNCES = re.compile(
    r"(?:raised|(?:following|original|inner|underlying) (?:error|exception)\w*|caused by|exception was|failed with)\W{0,3}:\s*$",
    re.I,
)
OF_NCCL = re.compile(r"nccl\w+Error: ")  # the second line of torch's DistBackendError
# What the kernel, a scheduler or a shell says is never the rest of an exception's text.
SYSTEM = re.compile(
    r"(?:kernel|systemd\S*|dmesg|journalctl\S*|qmaster\S*|kubelet|containerd|dockerd|earlyoom\S*)\b ?[:\[(|]|\[ *\d+\.\d+\] |[$+] \w|"
    r"(?:Warning|Normal) {2,}|Memory cgroup out|Out of memory: Kill|oom-kill|NVRM|=>> PBS|TERM_[A-Z]+|Exited with exit code|"
    r"\s*(?:Reason|Status|State|Exit Code|Last State): |LAST SEEN|JobID |exit code\W{1,3}-?\d+$",
)
STARTS_ANEW = re.compile(
    r"make(?:\[\d+\])?: |Sending process|ERROR conda|error: |Error: |\d+ processes|-- Process|Exception in|Waiting for|"
    r"\[|W\d{4}|E\d{4}|srun:|slurmstepd:|Killed|Killing|wandb:|\*\*\*|===|---|Running |Process |Root Cause|"
    r"node\S*:\d+:\d+ |\S+:\d+:\d+ \[\d+\] NCCL|\s*\d+%\|"
)


def exception_type(text: str) -> str:
    """'OutOfMemoryError' for "torch.OutOfMemoryError: CUDA …"; empty when the text does not begin with an exception."""
    found = EXCEPTION.match(text)
    return found["type"].replace("::", ".").rpartition(".")[2] if found else ""


def is_code(text: str) -> bool:
    """Source that a traceback quotes, or a frame of it."""
    text = text.strip()
    return bool(_CODE.match(text)) or text[:1] in BOX or bool(NATIVE_FRAME.match(text)) or text.startswith('File "')


def manner_of(line: Line) -> Manner:
    """Whether a plain line says itself that something failed, or only has the words in it."""
    if _QUOTED.search(line.text) and line.prefix.level != "error" and not SAYS_SO.match(line.text):
        return "quoted"
    match line.prefix.level:
        case "error":
            return "stated"
        case "debug" | "info" | "warning":
            return "mentioned"
        case _:
            return "stated"
