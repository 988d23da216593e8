"""Logs: what this library reports of itself, silent until its user asks for it."""

from kvcs.observe.logs import get_logger

__all__ = ["get_logger"]
