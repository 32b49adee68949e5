"""A diagnosis on the terminal: what died, how sure, the lines that prove it, what to do."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ..diagnosis.values import Diagnosis

_TIERS = {
    "device": "the GPU's memory", "host": "the host's memory", "pinned": "pinned host memory",
    "shm": "shared memory (/dev/shm)", "nvme": "disk space",
}  # fmt: skip
_KINDS = {
    "memory_pressure": "Memory pressure, no failure",
    "config": "The configuration is refused",
    "toolchain": "The environment cannot build or load something",
    "communication": "The ranks could not talk",
    "secondary": "Another rank failed first; this log shows only who noticed",
    "user_code": "The training code failed",
    "infrastructure": "The machine or the scheduler ended it",
    "none": "No failure is seen",
    "unknown": "Something failed, and the evidence does not say why",
}


def print_diagnosis(said: Diagnosis, console: Console) -> None:
    """Print it; reads nothing but the diagnosis."""
    style = "green" if said.kind == "none" else "yellow" if said.kind == "memory_pressure" else "red"
    console.print(Text.assemble((headline(said), f"bold {style}"), (f"  ({sureness(said.confidence)})", "dim")))
    for line in said.evidence:
        console.print(Text(f"  {line}", style="dim"))
    for place in said.places:
        console.print(Text(f"  at {place}", style="dim"))
    if said.advice:
        console.print(Text.assemble(("What to do: ", "bold"), said.advice))


def headline(said: Diagnosis) -> str:
    """'Out of the GPU's memory on rank 3 in backward'."""
    what = (
        f"Out of {_TIERS[said.tier]}"
        if said.kind == "out_of_memory" and said.tier
        else _KINDS.get(said.kind, said.kind)
    )
    rank = f" on rank {said.rank}" if said.rank is not None else ""
    return f"{what}{rank}{f' in {said.phase}' if said.phase else ''}"


def sureness(confidence: float) -> str:
    """A word for the number."""
    words = ((0.85, "sure"), (0.55, "likely"), (0.0, "a guess"))
    return next(word for least, word in words if confidence >= least) + f", {confidence:.2f}"
