"""From a results file to the forecast's constants: the CUDA context, NCCL, workspaces, and how sure the forecast is.

python tests/gpu/gpu_constants.py tests/benchmarks/results/DEVICE.json [MORE.json …] [--out FILE]

Each row is (low, typical, high) of what was measured, of all files together, and says its source:
- "CUDA context", or that "from Hopper on": what lies beside torch's allocator on one rank after the kinds of kernels of
  a training step.
- "NCCL": what its first collectives add, on two ranks or more; left as it is where no file has as many. The row is that
  of cards with NVLink: measured on others, its bytes belong to "NCCL without NVLink".
- "cuBLAS workspaces", or those "from Hopper on": of each trial that ran, what was reserved less what the forecast says
  without constants. Temporaries inside kernels are in it too, so their row is left to widen the high side alone.
- spread: the relative standard error of what is left of the forecast's error after that; half of the present `least` at
  the least.
Too few readings change nothing, and that is said. --out writes the whole constants.toml with these rows replaced,
checked as the forecast reads it; without it the rows are printed. The shipped file changes only when a person puts it
there.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_results as results

from autods.forecast.predict.memory_model import read_overheads
from autods.system.host import data_folder

MIB = 2**20
LEAST_CELLS = 10  # fewer trials say nothing of an interval
_WIDER = 1.1  # of the largest reading: the next machine is another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A row of constants.toml as measured; bytes. readings: how many; None in its place: too few, said by `why`."""

    name: str
    low: int = 0
    typical: int = 0
    high: int = 0
    source: str = ""
    readings: int = 0
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the files say. spread: None where there are too few trials."""

    rows: tuple[Fitted, ...]
    spread: float | None
    spread_source: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="write the whole file there")
    asked = parser.parse_args(argv)
    said = [results.read(path) for path in asked.files]
    wrong = [str(path) for path, one in zip(asked.files, said, strict=True) if one["device"].get("kind") != "cuda"]
    if wrong:
        print(f"gpu_constants.py: {wrong[0]}: not measured on a card", file=sys.stderr)
        return 2
    found = fitted(said, [path.name for path in asked.files])
    print(shown(found))
    if asked.out is not None:
        shipped = (data_folder("configs") / "forecast" / "constants.toml").read_text()
        asked.out.write_text(replaced(shipped, found))
        read_overheads(asked.out)  # raises InputError where a row is wrong
        print(f"written: {asked.out}")
    return 0


def fitted(files: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Constants:
    """From all files together."""
    where = f"{', '.join(_device(one) for one in files)}: {', '.join(names)}"
    cells = [cell for one in files for cell in one["cells"] if _counts(cell)]
    inside = [_residual(cell) for cell in cells]
    rows = (
        _row(row_of("CUDA context", files), [size for one in files for size in contexts(one)], 1, f"context, {where}"),
        _row("NCCL", [size for one in files for size in collectives(one)], 1, f"first collectives, {where}"),
        _row(row_of("cuBLAS workspaces", files), inside, LEAST_CELLS, f"reserved less tensors' forecast, {where}"),
    )
    workspace = rows[-1].typical if rows[-1].why is None else None
    return Constants(rows=rows, spread=_spread(cells, workspace), spread_source=f"{len(cells)} trials, {where}")


def row_of(name: str, files: Sequence[Mapping[str, Any]]) -> str:
    """The name of the row for these cards; of cards on both sides of Hopper, the newer one's."""
    known = [tuple(one["capability"]) for said in files for one in said["context"] if one.get("capability")]
    return f"{name} from Hopper on" if max(known, default=(0, 0)) >= (9, 0) else name


def contexts(said: Mapping[str, Any]) -> list[int]:
    """Beside the allocator on one rank alone, after its kernels."""
    return [
        step["held_bytes"]
        for one in said["context"]
        if one["world_size"] == 1
        for step in one["steps"]
        if step["step"] == "kernels" and step["held_bytes"] is not None
    ]


def collectives(said: Mapping[str, Any]) -> list[int]:
    """What the first collectives added, on two ranks or more; by trials too, where they had as many."""
    found = []
    for one in said["context"]:
        held = {step["step"]: step["held_bytes"] for step in one["steps"]}
        if one["world_size"] > 1 and held.get("collectives") is not None and held.get("kernels") is not None:
            found.append(max(0, held["collectives"] - held["kernels"]))
    alone = contexts(said)
    for cell in said["cells"]:
        beside = cell["measured"].get("device_beside")
        if cell["world_size"] > 1 and results.fits(cell) and beside is not None and alone:
            found.append(max(0, beside - round(statistics.median(alone))))
    return found


def _counts(cell: Mapping[str, Any]) -> bool:
    """A trial that ran and was forecast in full."""
    return results.fits(cell) and "at_limit_bytes" in (cell.get("forecast") or {})


def _residual(cell: Mapping[str, Any]) -> int:
    """What was reserved beyond the forecast of the tensors, as the allocator holds them; negative: it says too much."""
    return _reserved(cell) - _tensors(cell)


def _reserved(cell: Mapping[str, Any]) -> int:
    return int(cell["measured"]["device"] - (cell["measured"].get("device_beside") or 0))


def _tensors(cell: Mapping[str, Any]) -> int:
    """The forecast of what was reserved, without constants."""
    said = cell["forecast"]
    return int(said["at_limit_bytes"] - said["inside_bytes"] - said["beside_bytes"])


def _row(name: str, readings: Sequence[int], least: int, source: str) -> Fitted:
    if len(readings) < least:
        return Fitted(name=name, why=f"{len(readings)} readings, at least {least} are needed: left as it is")
    ordered = sorted(readings)
    typical = max(0, round(statistics.median(ordered)))
    return Fitted(
        name=name,
        low=max(0, min(typical, _at(ordered, 0.025))),
        typical=typical,
        high=max(typical, round(_WIDER * max(0, _at(ordered, 0.975)))),
        source=f"measured, {len(ordered)} readings: {source}",
        readings=len(ordered),
    )


def _spread(cells: Sequence[Mapping[str, Any]], workspace: int | None) -> float | None:
    """Root mean square of the logarithm of measured over forecast, with the measured workspaces in place of the old."""
    if len(cells) < LEAST_CELLS or workspace is None:
        return None
    errors = []
    for cell in cells:
        errors.append(math.log(_reserved(cell) / max(1, _tensors(cell) + workspace)))
    return math.sqrt(statistics.fmean(error * error for error in errors))


def _at(ordered: Sequence[int], share: float) -> int:
    found = results.quantile(ordered, share)
    assert found is not None
    return int(found)


def _device(said: Mapping[str, Any]) -> str:
    device, versions = said["device"], said["versions"]
    return f"{device['name']} (driver {device.get('driver')}, torch {versions.get('torch')})"


def shown(found: Constants) -> str:
    """The rows as the file has them, or why there are none."""
    lines = []
    for row in found.rows:
        lines.append(f"{row.name}: {row.why}" if row.why else f"{row.name}: {_bytes(row)}, {row.source}")
    spread = "left as it is: too few trials" if found.spread is None else f"{found.spread:.3f}, {found.spread_source}"
    return "\n".join([*lines, f"spread of cuda: {spread}"])


def replaced(shipped: str, found: Constants) -> str:
    """The shipped text with what was measured; comments and every other row stay."""
    text = shipped
    for row in found.rows:
        if row.why is None:
            text = _with_row(text, row)
    if found.spread is not None:
        line = f"cuda = {max(found.spread, _least(shipped)):.3f}  # measured: {found.spread_source}"
        text = re.sub(r"(?<=\n)cuda = [^\n]*", lambda _: line, text, count=1)
    return text


def _least(text: str) -> float:
    """No spread is stated that is smaller than half the narrowest half-width."""
    least = text.partition("[least]")[2]
    return float(re.findall(r"\ncuda = ([\d.]+)", least)[0]) / 2


def _with_row(text: str, row: Fitted) -> str:
    blocks = text.split("[[constant]]")
    for place, block in enumerate(blocks):
        if f'\nname = "{row.name}"\n' in block:
            block = re.sub(r"\nbytes = [^\n]*", lambda _: f"\nbytes = {_bytes(row)}", block)
            blocks[place] = re.sub(r"\nsource = [^\n]*", lambda _: f'\nsource = "{row.source}"', block)
            return "[[constant]]".join(blocks)
    raise ValueError(f"the shipped file has no row {row.name!r}")


def _bytes(row: Fitted) -> str:
    sizes = (math.floor(row.low / MIB), round(row.typical / MIB), math.ceil(row.high / MIB))
    return "[" + ", ".join('"0"' if size == 0 else f'"{size}MiB"' for size in sizes) + "]"


if __name__ == "__main__":
    sys.exit(main())
