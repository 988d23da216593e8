"""The command: ``python -m bench ARGS``, which is ``kvcs bench ARGS``."""

from __future__ import annotations

import sys

from kvcs.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
