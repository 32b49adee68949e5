"""`python -m tests.corpus.provoke NAME…`, `--all`, or `--missing`: provoke, record, say what was recorded."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import time

from tests.corpus import provoke
from tests.corpus.provoke.cases import CASES, RECORDED, record


def main() -> None:
    for module in sorted(each.name for each in pkgutil.iter_modules(provoke.__path__) if not each.name.startswith("_")):
        importlib.import_module(f"{provoke.__name__}.{module}")
    parser = argparse.ArgumentParser(prog="python -m tests.corpus.provoke", description=provoke.__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="record every case anew")
    parser.add_argument("--missing", action="store_true", help="record the cases that have no log yet")
    parser.add_argument("--list", action="store_true", help="print the table of cases")
    options = parser.parse_args()
    if options.list:
        for case in CASES.values():
            print(f"{case.name:58} {case.label.kind:16} {case.label.tier or '–':7} {case.label.action}")
        return
    names = list(CASES) if options.all else options.names
    if options.missing:
        names = [each for each in CASES if not list(RECORDED.glob(f"{each}.log")) + list(RECORDED.glob(each))]
    for name in names:
        started = time.monotonic()
        try:
            path = record(CASES[name])
        except Exception as error:
            print(f"{name}: NOT RECORDED: {error!r}", flush=True)
            continue
        print(f"{path.name}: {CASES[name].label.kind}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
