"""What user code must not do: rows of code, the line of it that is to blame, and words of the message."""

from __future__ import annotations

import textwrap

_MODEL = """\
import os, signal, sys, torch
# import


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        # forward
        loss = self.layer(x).mean()
        loss.register_hook(in_backward)
        return loss


def in_backward(gradient):
    # backward
    return gradient


def build_model():
    # build_model
    return Model()


def build_batch(micro_batch_size):
    # build_batch
    return {"x": torch.ones(micro_batch_size, 4)}


def build_optimizer(parameters):
    # build_optimizer
    return torch.optim.SGD(parameters, lr=0.1)


def loss(model, batch):
    # loss
    return model(**batch)
"""


def place_in(function: str, code: str) -> tuple[str, int]:
    """A model.py with the code in that function, or at import; and the number of the code's first line."""
    lines = _MODEL.splitlines()
    at = next(number for number, line in enumerate(lines) if line.strip() == f"# {function}")
    indent = lines[at].partition("#")[0]
    text = [*lines[:at], *textwrap.indent(code, indent).splitlines(), *lines[at + 1 :]]
    return "\n".join(text) + "\n", at + 1


_RAISES = "class Mine({base}):\n    def __str__(self): {body}\nraise Mine('x')"
# Code, the line that is to blame (0 is the first; None: the file as a whole), and the message.
Misdeeds = dict[str, tuple[str, int | None, str]]
ENDS: Misdeeds = {
    "os._exit(0)": ("os._exit(0)", None, "the process left with exit code 0 and no result"),
    "os._exit while an error is handled": (
        "try:\n    raise ValueError('first')\nexcept ValueError:\n    os._exit(1)",
        None,
        "the process left with exit code 1 and no result",
    ),
    "another program": ("os.execlp('true', 'true')", None, "the process left with exit code 0 and no result"),
    "os.abort": ("os.abort()", 0, "killed by SIGABRT"),
    "a crash in C": ("import ctypes\nctypes.string_at(0)", 1, "killed by SIGSEGV"),
    "a fork that comes back": ("os.fork()", None, "os.fork() was called, and the new process goes on as a second rank"),
    "sys.exit()": ("sys.exit()", 0, "sys.exit() was called"),
    "sys.exit of a text": ("sys.exit('text')", 0, "sys.exit(text) was called"),
    "sys.exit of 300": ("sys.exit(300)", 0, "sys.exit(300) was called"),
    "sys.exit of colours": ("sys.exit('\\x1b[31mred\\x07')", 0, "sys.exit(red\\x07) was called"),
}
RAISES: Misdeeds = {
    "a __str__ that raises": (_RAISES.format(base="Exception", body="raise RuntimeError"), 2, "Mine: Mine('x')"),
    "a __str__ that exits": (_RAISES.format(base="Exception", body="sys.exit(3)"), 2, "Mine: Mine('x')"),
    "a __str__ of no text": (_RAISES.format(base="Exception", body="return 5"), 2, "Mine: Mine('x')"),
    "neither __str__ nor __repr__": (
        _RAISES.format(base="Exception", body="raise RuntimeError\n    __repr__ = __str__"),
        3,
        "Mine: (no text: its __str__ raises an exception)",
    ),
    "ten megabytes": ("raise ValueError('x' * 10_000_000)", 0, "ValueError: xxx"),
    "NUL": ("raise ValueError('a\\0b')", 0, "ValueError: a\\x00b"),
    "colours": ("raise ValueError('\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07!')", 0, "ValueError: red !"),
    "half a character": ("raise ValueError('a\\udc80b')", 0, "ValueError: a\\udc80b"),
    "another direction": ("raise ValueError('a\\u202eb')", 0, "ValueError: a\\u202eb"),
    "lines": ("raise ValueError('\\n\\na\\nb')", 0, "ValueError: a\n"),
    "nothing to say": ("raise ValueError", 0, "ValueError\n"),
    "a name of colours": ("raise type('\\x1b[31mE\\n', (Exception,), {})('x')", 0, "E"),
    "no pickle": ("class Mine(Exception):\n    def __reduce__(self): raise TypeError\nraise Mine('x')", 2, "Mine: x"),
    "BaseException": ("raise BaseException('x')", 0, "BaseException: x"),
    "a class of BaseException": ("class Mine(BaseException): pass\nraise Mine('x')", 1, "Mine: x"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", 0, "KeyboardInterrupt\n"),
    "GeneratorExit": ("raise GeneratorExit", 0, "GeneratorExit\n"),
    "StopIteration": ("raise StopIteration", 0, "StopIteration\n"),
    "RecursionError": ("f = lambda: f()\nf()", 0, "RecursionError: maximum recursion depth exceeded"),
    "CancelledError": ("import asyncio\nraise asyncio.CancelledError", 1, "CancelledError\n"),
    "a group": ("raise BaseExceptionGroup('g', [KeyboardInterrupt()])", 0, "BaseExceptionGroup: g (1 sub-exception)"),
    "a cause in a circle": ("e = ValueError('x')\ne.__cause__ = e\nraise e", 2, "ValueError: x"),
    "after it lost the streams": ("sys.stdout = sys.stderr = object()\nraise ValueError('x')", 1, "ValueError: x"),
}
# The result of a rank cannot be written after these.
PREVENTS: Misdeeds = {
    "no files": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        None,
        "the rank could not write its result",
    ),
    "files of no size": (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        None,
        "the rank could not write its result",
    ),
    "json without functions": (
        "import json\njson.dumps = json.loads = None",
        None,
        "the rank could not write its result: TypeError: 'NoneType' object is not callable",
    ),
}
AT_IMPORT: Misdeeds = {**ENDS, **RAISES, **PREVENTS}
IN_FORWARD: Misdeeds = {**ENDS, **RAISES}
_EVERYWHERE = ("os._exit(0)", "a __str__ that raises", "KeyboardInterrupt", "a crash in C", "sys.exit of 300")
IN_OTHER_FUNCTIONS: dict[str, Misdeeds] = {
    function: {name: AT_IMPORT[name] for name in _EVERYWHERE}
    for function in ("build_model", "build_batch", "build_optimizer", "loss", "backward")
}
