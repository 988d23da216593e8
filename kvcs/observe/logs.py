"""Loggers of the library: structlog on the standard library's logging, never configured here.

Events are short constant names with key-value facts, and hold no payload octets, keys, tokens or
token ids. Nothing is shown before the application configures logging for "kvcs".
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvcs.errors import KvcsError

# Without a handler of its own the standard library would print warnings to standard error.
logging.getLogger("kvcs").addHandler(logging.NullHandler())

PLAIN: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.format_exc_info,
    structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True),
)
"""How events become text where the application has not configured structlog.

structlog's own default prints local variables with a traceback, and those hold keys and tensors.
"""


LINES_PER_SECOND = 100.0
"""Lines of one logger in the long run, from level info up: a peer can cause many of them."""

LINES_AT_ONCE = 1000
"""Lines that may come at once, before the rate counts."""

DEBUG_METHODS = frozenset({"debug", "notset"})
"""Lines that are never left out: whoever asks for them wants them all."""

lines_left_out: Counter[str] = Counter()
"""Lines that were left out, by logger; the next line that passes says how many came before it."""


class _Lines:
    """Lines of one logger that may still pass."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = float(LINES_AT_ONCE)
        self._at = 0.0
        self._untold = 0

    def pass_on(self, event: EventDict, now: float) -> None:
        """Count one line.

        Raises:
            structlog.DropEvent: there were too many.
        """
        if now > self._at:
            self._left = min(LINES_AT_ONCE, self._left + (now - self._at) * LINES_PER_SECOND)
            self._at = now
        if self._left < 1:
            self._untold += 1
            lines_left_out[self._name] += 1
            raise structlog.DropEvent
        self._left -= 1
        if self._untold:
            event["lines_left_out"], self._untold = self._untold, 0


_lines: dict[str, _Lines] = {}


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a room.

    Args:
        name: "kvcs." and the room.

    Returns:
        A structlog logger that passes on a bounded number of lines in a time. It renders by the
        application's structlog configuration, or plainly where there is none, and hands over to
        the standard library's logger of that name.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[_render],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return logger


def _render(logger: WrappedLogger, method: str, event: EventDict) -> Any:
    if method not in DEBUG_METHODS:
        lines = _lines.get(logger.name)
        if lines is None:
            lines = _lines[logger.name] = _Lines(logger.name)
        lines.pass_on(event, time.monotonic())
    configured = structlog.is_configured()
    processors = structlog.get_config()["processors"] if configured else PLAIN
    rendered: Any = event
    for processor in processors:
        rendered = processor(logger, method, rendered)
    return rendered


def described(error: BaseException) -> str:
    """An error for a log: its kind, and its text if it is one of ours.

    What a caller's own code raises may hold tokens, keys or a prompt.
    """
    kind = type(error).__name__
    return f"{kind}: {error}" if isinstance(error, KvcsError) else kind
