"""Record what the JSON contracts hold for the examples, and compare two recordings.

python -m tests.support.contracts record FOLDER [--only NAME ...]     runs the commands of this checkout
python -m tests.support.contracts compare BEFORE AFTER                 exit code 1 where something changed

`compare` demands the same keys everywhere, at any depth. Values are compared where they are deterministic: all of
`autods plan`, `autods probe --forecast-only` and `autods diagnose`, but neither what a real trial measured nor the
wording of sentences for people.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CPU_RANKS = ("--gpus", "2", "--device", "cpu")
NODE = ("--gpus", "8", "--gpu-memory", "80GiB", "--host-memory", "1TiB", "--nvme", "4TiB")

SENTENCES = ("advice", "assumed", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One command. exact: whether its values are compared, too. ignored: keys whose values may differ nevertheless."""

    command: tuple[str, ...]
    exact: bool
    ignored: frozenset[str] = frozenset({"versions", "hardware", "seconds", "path", "out", *SENTENCES})


RECORDINGS: Mapping[str, Recording] = {
    "plan-llama-7b": Recording(command=("plan", "examples/geometries/llama-7b", *NODE, "--json"), exact=True),
    "plan-t5-3b": Recording(command=("plan", "examples/geometries/t5-3b", *NODE, "--json"), exact=True),
    "plan-gpt": Recording(
        command=("plan", "examples/gpt.py", "--on", "a100-80gb,t4-16gb", "--gpus", "4", "--json"), exact=True
    ),
    "probe-forecast": Recording(
        command=(
            *("probe", "examples/gpt.py", *CPU_RANKS, "--gpu-memory", "2GiB", "--vary", "rung=zero1,zero2,zero3"),
            *("--capacity", "--forecast-only", "--fresh", "--out", "{out}", "--json"),
        ),
        exact=True,
    ),
    "probe": Recording(
        command=(
            *("probe", "examples/gpt.py", *CPU_RANKS, "--gpu-memory", "2GiB", "--vary", "rung=zero1,zero2"),
            *("--vary", "micro_batch=1,2", "--repeats", "2", "--fresh", "--out", "{out}", "--json"),
        ),
        exact=False,
    ),
    "fit": Recording(
        command=(
            *("fit", "examples/gpt.py", *CPU_RANKS, "--gpu-memory", "416MiB", "--config", "quick", "--fresh"),
            *("--out", "{out}", "--json"),
        ),
        exact=False,
    ),
}


def record(folder: Path, names: list[str]) -> None:
    """Write what each command prints to FOLDER/NAME.json, and the diagnoses of the whole corpus to diagnose.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or [*RECORDINGS, "diagnose"]:
        print(name, flush=True)
        if name == "diagnose":
            (folder / "diagnose.json").write_text(json.dumps(diagnoses(), indent=1))
            continue
        words = [word.replace("{out}", str(folder / f"{name}-out")) for word in RECORDINGS[name].command]
        done = subprocess.run(
            [sys.executable, "-m", "autods", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        (folder / f"{name}.json").write_text(done.stdout)


def diagnoses() -> dict[str, Any]:
    """The diagnosis of every log of the corpus, by its path."""
    import autods

    corpus = ROOT / "tests" / "corpus"
    logs = sorted(path for path in corpus.rglob("*") if path.suffix in (".log", ".txt", ".out", ".err"))
    return {str(path.relative_to(ROOT)): autods.diagnose(path).to_dict() for path in logs}


def differences(name: str, before: Any, after: Any, place: str = "") -> Iterator[str]:
    """What changed between two JSON values: keys that came or went, and values where they are to be the same."""
    recording = RECORDINGS.get(name)
    exact = recording is None or recording.exact
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - after.keys():
            yield f"{place}.{key} is gone"
        for key in after.keys() - before.keys():
            yield f"{place}.{key} is new"
        for key in before.keys() & after.keys():
            if key not in (recording.ignored if recording is not None else SENTENCES):
                yield from differences(name, before[key], after[key], f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        if exact and len(before) != len(after):
            yield f"{place}: {len(before)} entries became {len(after)}"
        elif before and after and not exact:
            yield from differences(name, before[0], after[0], f"{place}[0]")
        else:
            for number, pair in enumerate(zip(before, after, strict=True)):
                yield from differences(name, *pair, f"{place}[{number}]")
    elif exact and before != after:
        yield f"{place}: {before!r} became {after!r}"


def compare(before: Path, after: Path) -> int:
    """Print every difference; the number of recordings that differ."""
    changed = 0
    for path in sorted(before.glob("*.json")):
        if not (after / path.name).exists():
            print(f"{path.stem}: not recorded afterwards")
            continue
        lines = list(differences(path.stem, json.loads(path.read_text()), json.loads((after / path.name).read_text())))
        print(f"{path.stem}: {'the same' if not lines else f'{len(lines)} differences'}")
        for line in lines[:40]:
            print(f"  {line}")
        changed += bool(lines)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--only", nargs="*", default=[], choices=[*RECORDINGS, "diagnose"])
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.folder.resolve(), asked.only)
        return 0
    return int(compare(asked.before, asked.after) > 0)


if __name__ == "__main__":
    sys.exit(main())
