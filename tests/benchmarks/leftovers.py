"""What is left 0, 1, 2, 5 and 10 s after each fault: processes, files in /tmp and /dev/shm, sockets. The bar: nothing.

python tests/benchmarks/leftovers.py [WORD…] [--show] runs the faults whose name has one of the words, all without any.
Every fault has namespaces of its own, which need root: what is there afterwards is all its own. Unix sockets without a
name are counted as well. --show lists what is left after 10 s, and what a command said that did not end as it should.
Exit code 1 when anything is left after 10 s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.leftovers import AFTER_S, FAULTS, Row, finish, start, why_not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 2
    print(f"{'fault':50} exit" + "".join(f"{f'{after_s:.0f} s':>15}" for after_s in AFTER_S), flush=True)
    is_clean = True
    for name in [name for name in FAULTS if not asked.words or any(word in name for word in asked.words)]:
        row = finish(name, start(name))
        is_clean &= row.is_clean
        print(f"{name:50} {row.code!s:>4}" + "".join(f"{count(row, at):>15}" for at in AFTER_S), flush=True)
        if row.problem:
            print(f"    {row.problem}")
        if asked.show:
            show(row)
    return 0 if is_clean else 1


def count(row: Row, after_s: float) -> str:
    """'3p 1t 2s': processes, files in /tmp (with scratch folders), files in /dev/shm, sockets."""
    left = {kind: len(items) for kind, items in row.left[after_s].items()}
    counts = {
        "p": left.get("processes", 0), "t": left.get("/tmp", 0) + left.get("scratch", 0), "m": left.get("/dev/shm", 0),
        "s": left.get("TCP", 0) + left.get("unix", 0),
    }  # fmt: skip
    return " ".join(f"{number}{kind}" for kind, number in counts.items() if number) or "-"


def show(row: Row) -> None:
    for kind, items in row.left[AFTER_S[-1]].items():
        for item in items:
            print(f"    {kind}: {item}")
    if row.problem:
        print("    | " + row.said.strip().replace("\n", "\n    | "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
