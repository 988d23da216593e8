"""The `kvcs` command: a thin shell over the library, one module per group of commands.

A command is an ordinary function under `frame.command`; `app` puts them together. What goes to
standard output is the result and nothing else; everything said on the way goes to standard error.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `kvcs.cli.app.main`.

    It is imported here, since Ctrl-C may come while that goes on, too.
    """
    try:
        from kvcs.cli.app import main as run
    except KeyboardInterrupt:
        return 130  # `ExitCode.INTERRUPTED`, which is not there yet
    return run(arguments)
