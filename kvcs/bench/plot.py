"""Ratios as a picture: one panel for each group, a bar for each ratio and its range."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcs.bench.children import Unavailable
from kvcs.errors import FileError

if TYPE_CHECKING:
    from kvcs.bench.result import Result

BAR_INCHES: Final = 0.28
WIDTH_INCHES: Final = 9.0
HEAD_INCHES: Final = 0.9


def check_plot(path: Path) -> None:
    """Check before hours of measuring that a picture can be drawn there.

    Raises:
        Unavailable: matplotlib is not installed.
        FileError: the folder does not exist, or the form is not known.
    """
    if find_spec("matplotlib") is None:
        raise Unavailable("--plot needs matplotlib: pip install '.[bench]' in the source's folder")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise FileError(f"{path}: a plot is a .png, .svg or .pdf file")
    if not os.path.isdir(path.parent):
        raise FileError(f"{path.parent} is not a folder")


def draw(result: Result, path: Path) -> None:
    """Draw every ratio.

    Raises:
        FileError: the file cannot be written, or there is nothing to draw.
    """
    from matplotlib.figure import Figure

    panels = [
        (group.name, bars)
        for group in result.groups
        if (bars := [(r.name, s) for g, r, s in result.ratios_by_group() if g is group])
    ]
    if not panels:
        raise FileError(f"{path}: no ratio was measured, so there is nothing to draw")
    heights = [HEAD_INCHES + BAR_INCHES * len(bars) for _, bars in panels]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, bars) in zip(axes, panels, strict=True):
        labels = [text.replace("_over_", " / ").replace("_", " ") for text, _ in bars]
        medians = [spread.median for _, spread in bars]
        below = [spread.median - spread.least for _, spread in bars]
        above = [spread.most - spread.median for _, spread in bars]
        places = range(len(bars), 0, -1)
        axis.barh(places, medians, xerr=(below, above), color="#4878a8", ecolor="#333333")
        axis.set_yticks(places, labels, fontsize=7)
        axis.axvline(1.0, color="#888888", linewidth=0.8)
        axis.set_title(f"{name}: ratios, median and range", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
    try:
        figure.savefig(path)
    except OSError as exc:
        raise FileError(f"{path} cannot be written: {exc.strerror}") from exc
