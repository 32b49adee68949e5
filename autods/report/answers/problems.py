"""The documents of `autods explain`, `doctor` and `diagnose`: what is wrong, how sure that is, and what mends it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ...config.problems import Severity
from ...diagnosis import Diagnosis
from ...types import TIERS_OF_A_NODE, Tier
from ...units import format_bytes
from .. import document as doc
from ..document import StyledLine, line, make_document, titled
from ..results.doctor import CheckStatus, Checkup
from ..results.explain import ExplainedKey, Explanation, KeyCost, NeededMemory
from ..text import TIER_NAMES, format_number_of

# Explain.

_MOST_SHOWN = 200  # keys of a section, findings
_LONGEST_SHOWN = 400  # characters of a key or a value
_SEVERITY_STYLES: Mapping[Severity, str] = {"error": "red", "warning": "yellow", "note": "cyan"}


def make_explain_document(explanation: Explanation) -> doc.Document:
    """What is wrong, what a rank needs, the keys by section, then what was assumed."""
    question = f"{explanation.config}, as DeepSpeed {explanation.deepspeed} reads it"
    return make_document(title=explanation.config, question=question, parts=_list_explained(explanation))


def _list_explained(explanation: Explanation) -> Iterator[doc.Part]:
    count = Counter(finding.severity for finding in explanation.findings)
    counted = ", ".join(format_number_of(count[severity], severity) for severity in _SEVERITY_STYLES if count[severity])
    style = "green" if not count else next(style for severity, style in _SEVERITY_STYLES.items() if count[severity])
    yield doc.Headline(words=line((counted or "Nothing is wrong with it.", f"bold {style}")))
    for finding in explanation.findings[:_MOST_SHOWN]:
        severity = (finding.severity, f"bold {_SEVERITY_STYLES[finding.severity]}")
        yield doc.Paragraph(words=line(severity, f": {_cut(finding.key)}: {finding.problem}"))
        if finding.hint:
            yield doc.Paragraph(words=line((finding.hint, "dim")), indent=2)
    yield from _count_others(len(explanation.findings), "finding")
    if explanation.memory is not None:
        yield doc.Paragraph(words=_describe_memory(explanation.memory), gap=True)
    sections: dict[str, list[ExplainedKey]] = {"": []}  # keys at the top come first
    for key in explanation.keys:
        sections.setdefault(key.key.rpartition(".")[0], []).append(key)
    for section, keys in sections.items():
        if section:
            yield doc.Heading(words=_cut(section))
        for number, key in enumerate(keys[:_MOST_SHOWN]):
            words = line(f"{_cut(key.key.rpartition('.')[2])} = ", (_format_value(key.value), "cyan"))
            yield doc.Paragraph(words=words, indent=2, gap=not section and not number)
            yield from (doc.Paragraph(words=words, indent=4) for words in _explain_key(key))
        yield from _count_others(len(keys), "key")
    if explanation.memory is not None:
        sentences = tuple(line((sentence, "dim")) for sentence in explanation.memory.assumed)
        yield from titled("Assumed", doc.Bullets(items=sentences))


def _count_others(count: int, noun: str) -> Iterator[doc.Part]:
    if count > _MOST_SHOWN:
        more = format_number_of(count - _MOST_SHOWN, f"more {noun}")
        yield doc.Paragraph(words=line((f"… {more}: --json has them all", "dim")), indent=2)


def _cut(text: str) -> str:
    """A key or a value on one line: that of a key may have line ends, or no character at all."""
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    return text.replace("\n", "\\n").replace("\t", "\\t") or '""'


def _format_value(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= 10_000 and value == value // 1:
        return _cut(f"{value:,.0f}" if isinstance(value, float) else f"{value:,}")
    return _cut(json.dumps(value))


def _explain_key(key: ExplainedKey) -> Iterator[StyledLine]:
    differs = key.has_default and key.default != key.value
    default = f" Default: {_format_value(key.default)}." if differs else ""
    yield line(key.meaning or "No description.", (default, "dim"))
    if key.measured is not None:
        yield line((_format_cost(key.measured), "yellow"))
    elif key.cost:
        yield line((key.cost, "dim"))


def _format_cost(cost: KeyCost) -> str:
    """'Here: device memory +1.2 GiB against 50,000,000.'"""
    changes = [
        f"{TIER_NAMES[tier]} {'+' if grown > 0 else '−'}{format_bytes(abs(grown))}{_of_whom(tier)}"
        for tier, grown in cost.tiers.items()
    ]
    return f"Here: {', '.join(changes) or 'no memory'} against {_format_value(cost.instead)}."


def _of_whom(tier: Tier) -> str:
    return " a node" if tier in TIERS_OF_A_NODE else ""


def _describe_memory(memory: NeededMemory) -> StyledLine:
    """What a rank needs on its device, and what a node needs for all of its ranks."""
    parts = []
    for tier, size in memory.tiers.items():
        if size or tier == "device":
            limit = f" of {format_bytes(memory.limits[tier])}" if tier in memory.limits else ""
            parts.append(f"{TIER_NAMES[tier]} {format_bytes(size)}{limit}{_of_whom(tier)}")
    batch = f"micro batch {memory.micro_batch} × accumulation {memory.accumulation}"
    ranks = format_number_of(memory.ranks, "rank")
    return line(
        (f"{memory.workload} on {ranks}, {batch}: {memory.verdict.replace('_', ' ')}", "bold"),
        f"\n  {', '.join(parts)}" if parts else "",
        f"\n  {memory.reason}" if memory.reason else "",
    )


# Doctor.

_CHECK_MARKS: Mapping[CheckStatus, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "broken": ("✗", "red"),
}


def make_doctor_document(checkup: Checkup) -> doc.Document:
    """A line for each check, and below it the remedy; then what the machine is ready for."""
    parts: list[doc.Part] = []
    for group, checks in itertools.groupby(checkup.checks, key=lambda check: check.group):
        parts.append(doc.Heading(words=group))
        for check in checks:
            words = line(_CHECK_MARKS[check.status], f" {check.name}: {check.result}")
            parts.append(doc.Paragraph(words=words, indent=2, hang=2))
            remedy = doc.Paragraph(words=line((check.remedy, "dim")), indent=6, whole=True)  # it may be a command
            parts += [remedy] if check.remedy else []
    counts = {status: sum(check.status == status for check in checkup.checks) for status in _CHECK_MARKS}
    counted = f"{counts['broken']} broken, {format_number_of(counts['warning'], 'warning')}, {counts['ok']} ok"
    ready = (f"ready for {', '.join(checkup.ready_for) or 'nothing'}", "red" if checkup.is_broken else "green")
    lacks = ", ".join(f"{use} (see {name})" for use, name in checkup.obstacles.items())
    parts.append(doc.Headline(words=line(ready, f"; not for {lacks}" if lacks else ""), effort=counted, gap=True))
    return make_document(title="doctor", question="", parts=parts)


# Diagnose.

_KINDS = {
    "memory_pressure": "Memory was short, nothing failed",
    "config": "The configuration was refused",
    "toolchain": "The environment cannot build or load something",
    "communication": "The ranks could not communicate",
    "secondary": "Another rank failed first; this log only shows who noticed",
    "user_code": "The training code failed",
    "infrastructure": "The cause is the machine, the scheduler or a service",
    "none": "No failure was found",
}
_SIGNATURES = {"user_code/not-a-number": "The training diverged"}  # of those that their kind does not name well
_CONFIDENCE_WORDS = ((0.85, "sure"), (0.55, "likely"), (0.0, "a guess"))


def make_diagnosis_document(diagnosis: Diagnosis, *, whole: bool = False) -> doc.Document:
    """'Out of device memory on rank 3  (likely, 0.60)', then the advice, the evidence and the notes.

    Lines of a log stay whole, so that they can be searched for; with `whole` everything does, as a file wants it.
    """
    place = f" on rank {diagnosis.rank}" if diagnosis.rank is not None else ""
    place += f" in {diagnosis.phase}" if diagnosis.phase else ""
    failure = _SIGNATURES.get(diagnosis.signature or "") or _KINDS.get(diagnosis.kind, diagnosis.kind)
    headline = f"{failure}{place}"
    if diagnosis.kind == "unknown":
        failed = "The run" if diagnosis.rank is None else f"Rank {diagnosis.rank}"
        headline = f"{failed} failed; the cause is not in the log"
        if diagnosis.phase == "load":
            headline = f"{failed} was killed while it loaded weights: host memory is likely, and not proven by the log"
    elif diagnosis.kind == "out_of_memory" and diagnosis.tier:
        headline = f"Out of {TIER_NAMES[diagnosis.tier].removesuffix(' (NVMe)')}{place}"  # it may be any disk
    style = {"none": "green", "memory_pressure": "yellow"}.get(diagnosis.kind, "red")
    sure = next(word for least, word in _CONFIDENCE_WORDS if diagnosis.confidence >= least)
    parts: list[doc.Part] = [
        doc.Headline(words=line((headline, f"bold {style}")), effort=f"{sure}, {diagnosis.confidence:.2f}", whole=whole)
    ]
    if diagnosis.advice:
        parts.append(doc.Paragraph(words=line(("What to do: ", "bold"), diagnosis.advice), whole=whole))
    notes = [note for note in diagnosis.notes if note.lower() not in diagnosis.advice.lower()]
    ranks = f"  ×{len(diagnosis.ranks)} ranks" if len(diagnosis.ranks) > 1 else ""
    for number, text in enumerate((*diagnosis.evidence, *(f"at {_cut(place)}" for place in diagnosis.places))):
        parts.append(doc.Paragraph(words=line((f"  {text}{'' if number else ranks}", "dim")), whole=True))
    parts += (doc.Paragraph(words=line((f"  · {note}", "dim")), whole=whole) for note in notes)
    return make_document(title="diagnosis", question="", parts=parts)
