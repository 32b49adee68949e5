"""The installed libraries have every symbol that autods replaces."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: it imports torch, DeepSpeed and the other patched libraries.
_LIST = """
import importlib.util, pathlib, autods
root = pathlib.Path(autods.__file__).parents[1]
for path in sorted((root / "autods").rglob("*.py")):
    if "patching import" in path.read_text():
        importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
from autods.rank import patching
for patch in patching.declared():
    problem = "found"
    if importlib.util.find_spec(patch.symbol.partition(".")[0]) is not None:
        try:
            patch.original()
        except patching.SymbolMissing as missing:
            problem = str(missing)
    print(patch.symbol, problem, sep="\\t")
"""


@pytest.mark.timeout(200)
def test_every_patched_symbol_exists() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _LIST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problems = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    assert "torch.nn.Module._apply" in problems
    assert {symbol: problem for symbol, problem in problems.items() if problem != "found"} == {}
