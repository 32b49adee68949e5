"""The result of `autods explain`: each key of a DeepSpeed config in words, and what is wrong with the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..config.validator import Severity
from ..units import format_bytes
from .results.explain import ExplainedKey, Explanation, KeyCost, NeededMemory
from .text import TIER_NAMES

_STYLES: Mapping[Severity, str] = {"error": "red", "warning": "yellow", "note": "cyan"}


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the keys by section, then what is wrong."""
    console.print(Text.assemble((explanation.config, "bold"), f", as DeepSpeed {explanation.deepspeed} reads it"))
    for section, keys in _group_by_section(explanation.keys).items():
        console.print()
        if section:
            console.print(Text(section, style="bold"))
        for key in keys:
            console.print(_format_name(key, section))
            console.print(Padding(_format_meaning(key), (0, 0, 0, 4)))
    if explanation.memory is not None:
        _print_memory(explanation.memory, console)
    console.print()
    if not explanation.findings:
        console.print(Text("Nothing is wrong with it.", style="green"))
    for finding in explanation.findings:
        line = Text.assemble(
            (finding.severity, f"bold {_STYLES[finding.severity]}"), f": {finding.key}: ", finding.problem
        )
        console.print(line)
        if finding.hint:
            console.print(Text(f"  {finding.hint}", style="dim"))


def _group_by_section(keys: tuple[ExplainedKey, ...]) -> dict[str, list[ExplainedKey]]:
    """Keys by the section that holds them; those at the top come first."""
    sections: dict[str, list[ExplainedKey]] = {"": []}
    for key in keys:
        sections.setdefault(key.key.rpartition(".")[0], []).append(key)
    return {section: members for section, members in sections.items() if members}


def _format_name(key: ExplainedKey, section: str) -> Text:
    name = key.key.removeprefix(f"{section}.") if section else key.key
    return Text.assemble(f"  {name} = ", (_format_value(key.value), "cyan"))


def _format_value(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,.0f}"
    return json.dumps(value)


def _format_meaning(key: ExplainedKey) -> Text:
    text = Text(key.meaning or "No description.")
    if key.has_default and key.default != key.value:
        text.append(f" Default: {_format_value(key.default)}.", style="dim")
    if key.measured is not None:
        text.append(f"\n{format_cost(key.measured)}", style="yellow")
    elif key.cost:
        text.append(f"\n{key.cost}", style="dim")
    return text


def format_cost(cost: KeyCost) -> str:
    """'Here: device memory +1.2 GiB against 50,000,000.'"""
    changes = [
        f"{TIER_NAMES[tier]} {'+' if grown > 0 else '−'}{format_bytes(abs(grown))}"
        for tier, grown in cost.tiers.items()
    ]
    return f"Here: {', '.join(changes) or 'no memory'} against {_format_value(cost.instead)}."


def _print_memory(memory: NeededMemory, console: Console) -> None:
    """Print what a rank needs on each tier."""
    console.print()
    parts = []
    for tier, size in memory.tiers.items():
        if size or tier == "device":
            limit = f" of {format_bytes(memory.limits[tier])}" if tier in memory.limits else ""
            parts.append(f"{TIER_NAMES[tier]} {format_bytes(size)}{limit}")
    console.print(
        Text.assemble(
            (f"{memory.workload} on {memory.ranks} ranks: {memory.verdict.replace('_', ' ')}", "bold"),
            f"  ({', '.join(parts)})" if parts else "",
            f"\n  {memory.reason}" if memory.reason else "",
        )
    )
