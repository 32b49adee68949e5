"""Where the command `autods`, and `python -m autods`, begin."""

from __future__ import annotations

import sys


def start() -> int:
    """The command line. A Ctrl-C while its imports last has nothing to save and says nothing."""
    try:
        from .cli.main import main
    except KeyboardInterrupt:
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(start())
