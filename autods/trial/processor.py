"""What DeepSpeed asks of the processor, read once from /proc: py-cpuinfo starts processes for it, 1.1 s each time."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_NAMES = {"vendor_id": "vendor_id_raw", "model name": "brand_raw"}


def remember(processor: Mapping[str, Any] | None = None) -> None:
    """py-cpuinfo answers `processor`; what this processor is where nothing is given."""
    with contextlib.suppress(ImportError):  # DeepSpeed does without it
        import cpuinfo

        whole, read = cpuinfo.get_cpu_info, described()
        info = processor or (Processor(read, whole) if read else whole())
        cpuinfo.get_cpu_info = lambda: info


class Processor(dict[str, Any]):
    """As py-cpuinfo has it. What was not read yet is looked up by `whole` when it is asked for."""

    def __init__(self, read: Mapping[str, Any], whole: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(read)
        self._whole = whole

    def __missing__(self, name: str) -> Any:
        self.update(self._whole())
        return dict(self)[name]


def described(text: str | None = None, machine: str | None = None) -> dict[str, Any]:
    """Architecture, vendor, brand and flags from the text of /proc/cpuinfo; nothing where it is no x86 with 64 bits."""
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64"):
        return {}
    if text is None:
        with contextlib.suppress(OSError):
            text = Path("/proc/cpuinfo").read_text()
    lines = (line.partition(":") for line in (text or "").partition("\n\n")[0].splitlines())
    said = {name.strip(): value.strip() for name, _, value in lines}
    if "flags" not in said:
        return {}
    known = {ours: said[theirs] for theirs, ours in _NAMES.items() if theirs in said}
    return {"arch": "X86_64", **known, "flags": sorted(said["flags"].split())}
