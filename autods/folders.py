"""Where autods keeps what outlives a run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """AUTODS_CACHE, or `autods` in the user's cache folder. It need not exist."""
    root = os.environ.get("AUTODS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "autods")
    return Path(root).expanduser()
