"""The installed libraries have every symbol that autods replaces."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: it imports torch, DeepSpeed, Ray and every module of autods.
_LIST = """
import importlib, pkgutil, autods
for module in pkgutil.walk_packages(autods.__path__, "autods."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from autods.trial import patching
for patch in patching.declared():
    print(patch.symbol, patch.problem() or "found", sep="\\t")
"""


def test_every_patched_symbol_exists() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _LIST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problems = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    assert "torch.nn.Module._apply" in problems
    assert {symbol: problem for symbol, problem in problems.items() if problem != "found"} == {}
