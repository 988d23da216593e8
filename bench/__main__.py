"""The command: ``python -m bench ARGS``, which is ``kvcs bench ARGS``."""

from __future__ import annotations

import sys

from kvcs.cli import main


def run() -> int:
    """Run the command with the arguments of this process; returns the exit code."""
    return main(["bench", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run())
