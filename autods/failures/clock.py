"""Times as logs write them → numbers that can be compared, where two of them can be."""

from __future__ import annotations

import re
from datetime import datetime

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_CLOCK = r"(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:[.,:](?P<f>\d+))?"
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[ T_-]" + _CLOCK,
        r"(?P<mo>\d\d)/(?P<d>\d\d)/(?P<y>\d{4}|\d\d) " + _CLOCK,
        r"(?P<mon>[A-Z][a-z]{2}) +(?P<d>\d{1,2}) " + _CLOCK + r"(?: (?P<y>\d{4}))?",
        r"[DIWEF](?P<mo>\d\d)(?P<d>\d\d) " + _CLOCK,  # glog
        r"^\[?(?P<mo>\d\d)[/-](?P<d>\d\d) " + _CLOCK,
    )
)
_OF_DAY = re.compile(r"(?:^|[\s\[])" + _CLOCK)
_UNIX = re.compile(r"^(1[5-9]\d{8})(?:\.(\d+))?$|^(1[5-9]\d{11})$")
SPAN = 160  # characters at a line's start that may hold its time

# How much of a date is told. Times of different kinds cannot be compared.
Clock = tuple[str, float]


def clock_of(text: str) -> Clock | None:
    """When, by the first time in the text's first characters: ("date" | "day" | "clock", seconds)."""
    text = text[:SPAN]
    if found := _UNIX.match(text.strip()):
        seconds = float(found[3]) / 1000 if found[3] else float(f"{found[1]}.{found[2] or 0}")
        return "date", seconds
    for form in _FORMS:
        if found := form.search(text):
            return _dated(found.groupdict())
    if found := _OF_DAY.search(text):
        return "clock", _of_day(found.groupdict())
    return None


def _dated(said: dict[str, str | None]) -> Clock | None:
    mon = said.get("mon")
    month = _MONTHS.index(mon.lower()) + 1 if mon and mon.lower() in _MONTHS else int(said.get("mo") or 0)
    year = said.get("y")
    full = int(year) + (2000 if len(year) == 2 else 0) if year else 2000
    try:
        day = datetime(full, month, int(said["d"] or 0))
    except ValueError:
        return None
    return ("date" if year else "day"), (day - datetime(1970, 1, 1)).total_seconds() + _of_day(said)


def _of_day(said: dict[str, str | None]) -> float:
    whole = int(said["h"] or 0) * 3600 + int(said["mi"] or 0) * 60 + int(said["s"] or 0)
    return whole + float(f"0.{said['f']}" if said.get("f") else 0)
