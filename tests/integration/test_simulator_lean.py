"""The compiler is put off in a process of its own: in this one it may be loaded already."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch
from autods.trial import lean
lean.install()
lean.with_the_compiler(lambda: print("told"))
print("eval_frame loaded:", "torch._dynamo.eval_frame" in sys.modules)
torch._dynamo.reset
print("eval_frame loaded:", "torch._dynamo.eval_frame" in sys.modules)
lean.with_the_compiler(lambda: print("told at once"))
"""


def test_the_compiler_is_told_when_it_is_loaded_and_not_loaded_to_be_told() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["eval_frame loaded: False", "told", "eval_frame loaded: True", "told at once"]
