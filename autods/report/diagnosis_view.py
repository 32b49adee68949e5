"""A diagnosis on the terminal: what died, how sure that is, what to do, and the lines that prove it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ..diagnosis import Diagnosis
from ..units import escape_controls
from .text import TIER_NAMES

_KINDS = {
    "memory_pressure": "Memory was short, nothing failed",
    "config": "The configuration was refused",
    "toolchain": "The environment cannot build or load something",
    "communication": "The ranks could not communicate",
    "secondary": "Another rank failed first; this log only shows who noticed",
    "user_code": "The training code failed",
    "infrastructure": "The machine or the scheduler ended the run",
    "none": "No failure was found",
}
_CONFIDENCE_WORDS = ((0.85, "sure"), (0.55, "likely"), (0.0, "a guess"))


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print 'Out of device memory on rank 3  (likely, 0.60)', then the advice, the evidence and the notes.

    Lines of a log stay whole, so that they can be searched for. Advice and notes are wrapped on a terminal only.
    """
    wraps = console.is_terminal
    place = f" on rank {diagnosis.rank}" if diagnosis.rank is not None else ""
    place += f" in {diagnosis.phase}" if diagnosis.phase else ""
    headline = f"{_KINDS.get(diagnosis.kind, diagnosis.kind)}{place}"
    if diagnosis.kind == "unknown":
        failed = "The run" if diagnosis.rank is None else f"Rank {diagnosis.rank}"
        headline = f"{failed} failed; the cause is not in the log"
    elif diagnosis.kind == "out_of_memory" and diagnosis.tier:
        headline = f"Out of {TIER_NAMES[diagnosis.tier]}{place}"
    style = {"none": "green", "memory_pressure": "yellow"}.get(diagnosis.kind, "red")
    sure = next(word for least, word in _CONFIDENCE_WORDS if diagnosis.confidence >= least)
    certainty = (f"  ({sure}, {diagnosis.confidence:.2f})", "dim")
    console.print(Text.assemble((headline, f"bold {style}"), certainty), soft_wrap=not wraps)
    if diagnosis.advice:
        advice = Text.assemble(("What to do: ", "bold"), escape_controls(diagnosis.advice))
        console.print(advice, soft_wrap=not wraps)
    ranks = f"  ×{len(diagnosis.ranks)} ranks" if len(diagnosis.ranks) > 1 else ""
    for number, line in enumerate((*diagnosis.evidence, *(f"at {place}" for place in diagnosis.places))):
        console.print(Text(f"  {escape_controls(line)}{'' if number else ranks}", style="dim"), soft_wrap=True)
    for note in diagnosis.notes:
        console.print(Text(f"  · {escape_controls(note)}", style="dim"), soft_wrap=not wraps)
