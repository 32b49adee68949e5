"""Bytes, counts, times and signals as people write and read them; text that a terminal shows and does not obey."""

from __future__ import annotations

import re
import signal

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "ki": 2**10, "kib": 2**10, "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30, "ti": 2**40, "tib": 2**40,
}  # fmt: skip
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_MOST_BYTES = 2**63
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """'416MiB' → 436207616. Raises ValueError with the accepted forms when it is not a size above zero."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or (size := float(match[1]) * factor) < 1:
        raise ValueError(f"{text!r:.60} is not a size; write it as 416MiB, 16GiB, 80GB or a number of bytes")
    if size >= _MOST_BYTES:
        raise ValueError(f"{text!r:.60} is more than a machine can address")
    return int(size)


def choose_unit(size: float) -> tuple[str, int]:
    """436207616 → ('MiB', 1048576): the largest unit of which there is at least one, else bytes."""
    return next((unit for unit in _UNITS if abs(size) >= unit[1]), ("B", 1))


MOST_SECONDS = 366 * 86400.0
_SECONDS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float:
    """'20m' → 1200.0. Raises ValueError with the accepted forms when it is not a time above zero."""
    match = _SIZE.fullmatch(text)
    factor = _SECONDS.get(match[2].lower()) if match else None
    if match is None or factor is None or (seconds := float(match[1]) * factor) <= 0:
        raise ValueError(f"{text!r:.60} is not a time; write it as 90s, 20m, 2h or a number of seconds")
    if seconds > MOST_SECONDS:
        raise ValueError(f"{text!r:.60} is longer than a year")
    return seconds


MOST_AMOUNT = 1e18
_AMOUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_AMOUNT = re.compile(r"\s*(\d[\d,_]*(?:\.\d+)?(?:[eE]\+?\d{1,3})?)\s*([kKmMbBtT]?)\s*")


def parse_amount(text: str) -> float:
    """'300B' → 3e11; also 1.5T, 300e9 and 1,000,000. Raises ValueError with the accepted forms."""
    match = _AMOUNT.fullmatch(text)
    amount = float(re.sub("[,_]", "", match[1])) * _AMOUNTS[match[2].lower()] if match else 0.0
    if amount < 1:
        raise ValueError(f"{text!r:.60} is not an amount; write it as 300B, 1.5T, 20M or 300e9")
    if amount > MOST_AMOUNT:
        raise ValueError(f"{text!r:.60} is more than {MOST_AMOUNT:.0e}")
    return amount


def format_bytes(size: float) -> str:
    """436207616 → '416.0 MiB'; negative sizes keep their sign."""
    name, factor = choose_unit(size)
    return f"{size:.0f} B" if factor == 1 else f"{size / factor:.1f} {name}"


def format_in(size: float, factor: int) -> str:
    """(21474836480, 2**30) → '20.0', of a column in one unit; '< 0.1' where a figure would read as nothing."""
    tenths = size / factor * 10
    return "< 0.1" if 0 < tenths < 0.5 else f"{tenths / 10:,.1f}"


def format_count(count: float) -> str:
    """32638976 → '32.6M', 999885952 → '1B'."""
    rounded = float(f"{count:.3g}")
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if rounded >= factor:
            return f"{rounded / factor:.10g}{unit}"
    return f"{count:.0f}"


_REAL_TIME = (34, 64)  # SIGRTMIN and SIGRTMAX of Linux; a log may be read on another system


def format_factor(factor: float) -> str:
    """How many times as much: '0.83', '1.24', '2.5', '20'."""
    return f"{factor:.2f}" if factor < 2 else f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"


def format_factor_below(factor: float, limit: float) -> str:
    """A factor that is below a limit near 1, in as many digits as show it: '1.02', or '1.027' below 1.03."""
    texts = (f"{factor:.{digits}f}" for digits in range(2, 12))
    return next((text for text in texts if float(text) < limit), f"{factor:.2f}")


def format_signal(number: int) -> str:
    """9 → 'SIGKILL', 40 → 'SIGRTMIN+6', as `kill -l` lists them; 'signal 99' for a number without a name."""
    first, last = _REAL_TIME
    if first < number < last:
        return f"SIGRTMIN+{number - first}" if number <= (first + last) // 2 else f"SIGRTMAX-{last - number}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Control characters, which act on a terminal, except line ends and tabs; those that turn the direction of text; other
# ends of lines; and halves of characters, which cannot be written.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    """'\x1b[31mred' with the first character written as '\\x1b': text of files and paths only shows on a terminal."""
    return _ACTING.sub(lambda match: ascii(match[0])[1:-1], text)
