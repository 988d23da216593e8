"""Loggers of the library: structlog on the standard library's logging, never configured here.

Events are short constant names with key-value facts, and hold no payload octets, keys, tokens or
token ids. Nothing is shown before the application configures logging for "kvcs".
"""

from __future__ import annotations

import logging
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

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


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a room.

    Args:
        name: "kvcs." and the room.

    Returns:
        A structlog logger that renders by the application's structlog configuration, or plainly
        where there is none, and hands over to the standard library's logger of that name.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[_render],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return logger


def _render(logger: WrappedLogger, method: str, event: EventDict) -> Any:
    configured = structlog.is_configured()
    processors = structlog.get_config()["processors"] if configured else PLAIN
    rendered: Any = event
    for processor in processors:
        rendered = processor(logger, method, rendered)
    return rendered
