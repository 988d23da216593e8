"""The `kvcs` command: a thin shell over the library, one module per group of commands.

A command is an ordinary function under `frame.command`; `app` puts them together. What goes to
standard output is the result and nothing else; everything said on the way goes to standard error.
"""

from __future__ import annotations

from kvcs.cli.app import main

__all__ = ["main"]
