"""What PYTORCH_ALLOC_CONF asks of torch's CUDA allocator, as far as a forecast knows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9 and later read the second where the first is not
_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\]]*)")
_HARMLESS = ("expandable_segments", "pinned_use_cuda_host_register", "pinned_num_register_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocConf:
    """name: of the variable that counts. unmodelled: settings that change what is reserved, and no forecast knows."""

    name: str | None = None
    expandable: bool = False
    unmodelled: tuple[str, ...] = ()

    @property
    def said(self) -> str | None:
        """What a person should know, if anything."""
        if not self.unmodelled:
            return None
        settings = ", ".join(self.unmodelled)
        return f"{self.name} has {settings}, of which the forecast knows nothing"


def alloc_conf(environment: Mapping[str, str]) -> AllocConf:
    """As torch reads it: the new name wins, whatever the old one says."""
    name = next((one for one in _NAMES if environment.get(one)), None)
    if name is None:
        return AllocConf()
    settings = {key: value.strip() for key, value in _SETTING.findall(environment[name])}
    expandable = settings.get("expandable_segments", "").lower() == "true"
    default = settings.get("backend") == "native"
    unmodelled = [key for key in settings if key not in _HARMLESS and not (key == "backend" and default)]
    return AllocConf(name=name, expandable=expandable, unmodelled=tuple(unmodelled))
