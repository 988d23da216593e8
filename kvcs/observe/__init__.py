"""Logs and metrics: what this library reports of itself, silent until its user asks for it."""

from kvcs.observe.logs import get_logger
from kvcs.observe.measures import Metrics, metrics

__all__ = ["Metrics", "get_logger", "metrics"]
