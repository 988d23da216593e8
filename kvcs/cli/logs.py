"""Logging of the command; the library itself never configures any."""

from __future__ import annotations

import io
import logging
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

from kvcs.cli.output import shown

if TYPE_CHECKING:
    import structlog


class LogLevel(StrEnum):
    """Least severe events that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _printable(
    logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape what could steer a terminal: reason phrases come from peers."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = shown(value)
    return event


def _traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """Write a traceback without local variables, its lines escaped like all that is shown."""
    import structlog

    lines = io.StringIO()
    structlog.dev.plain_traceback(lines, exc_info)
    stream.write("\n".join(map(shown, lines.getvalue().split("\n"))))


def configure(level: LogLevel, *, as_json: bool = False) -> None:
    """Send the library's log events to standard error.

    Args:
        level: least severe events that are shown; at ``debug`` aioquic's own are shown too.
        as_json: one JSON object a line, in place of lines for people.
    """
    # Here, since it takes a tenth of a second to import, which a look at the help need not.
    import structlog

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [
            _printable,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default shows local variables, which hold keys and tensors.
                exception_formatter=_traceback,
            ),
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    for name in ("kvcs", "quic"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.name)
    if level is not LogLevel.DEBUG:
        # aioquic tells at INFO about each connection what our own events say in our words.
        logging.getLogger("quic").setLevel(logging.ERROR)
