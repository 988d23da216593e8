"""Loggers of the library: structlog on the standard library's logging, never configured here.

Events are short constant names with key-value facts, and hold no payload octets, keys, tokens or
token ids. Nothing is shown before the application configures logging for "kvcs".
"""

from __future__ import annotations

import logging

import structlog

# Without a handler of its own the standard library would print warnings to standard error.
logging.getLogger("kvcs").addHandler(logging.NullHandler())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a room.

    Args:
        name: "kvcs." and the room.

    Returns:
        A structlog logger that renders by the application's structlog configuration and hands over
        to the standard library's logger of that name.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name), wrapper_class=structlog.stdlib.BoundLogger
    )
    return logger
