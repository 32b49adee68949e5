"""Where the command `autods`, and `python -m autods`, begin."""

from __future__ import annotations

import sys

from .cli.startup import prepare_process
from .errors import describe_failed_import


def start() -> int:
    """The command line. A Ctrl-C while its imports last has nothing to save and says nothing."""
    prepare_process()
    try:
        from .cli.main import main
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"error: {describe_failed_import(error)}", file=sys.stderr)
        return 3
    return main()


if __name__ == "__main__":
    sys.exit(start())
