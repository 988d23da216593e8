"""Runs the command in the test's process and gives back what a shell would see."""

from tests.command import logging_as_before, run

__all__ = ["logging_as_before", "run"]
