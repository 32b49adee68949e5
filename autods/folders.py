"""Where data lie: what ships with autods, and what it keeps for later runs."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InputError


def data_folder(name: str) -> Path:
    """`strategies` or `configs`: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise InputError(f"the folder {name}/ is missing from the installation", mend="reinstall autods")


def cache_folder() -> Path:
    """AUTODS_CACHE, or `autods` in the user's cache folder. It need not exist."""
    root = os.environ.get("AUTODS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "autods")
    return Path(root).expanduser()
