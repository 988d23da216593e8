"""Files that are written in place of others: what may give way to them."""

from __future__ import annotations

import os
import stat

from kvcs.errors import FileError


def check_replaced(path: str | os.PathLike[str]) -> None:
    """Check that nothing but a file would give way to a new one: /dev/null has to stay what it is.

    Raises:
        FileError: there is a device, a pipe or a folder, or it cannot be looked at.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as exc:
        raise FileError(f"{os.fspath(path)}: {exc.strerror or exc}") from exc
    if not stat.S_ISREG(mode):
        raise FileError(f"{os.fspath(path)}: not a regular file; it is not replaced")
