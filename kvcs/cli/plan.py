"""`kvcs plan`: whether a prompt's cache is better fetched or computed anew."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from kvcs.cli.frame import command
from kvcs.cli.options import DescriptorOption
from kvcs.cli.output import Output, octets_text
from kvcs.cli.prefixes import read_descriptor
from kvcs.errors import UsageError
from kvcs.kvfile import load_kv_file
from kvcs.planner import DEFAULT_ENDPOINT_RATE, plan

UNITS: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|B)/s")


def rate(text: str) -> float:
    """Read a rate such as ``10Gbit/s`` or ``250MB/s``; octets per second.

    Raises:
        typer.BadParameter: it is not one.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a rate such as 10Gbit/s or 250MB/s")
    number, unit, kind = found.groups()
    return float(number) * UNITS[unit] / (8 if kind == "bit" else 1)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "plan")
    def plan_(
        output: Output,
        link: Annotated[
            float,
            typer.Option(
                "--link", parser=rate, metavar="RATE", help="Slowest link, such as 10Gbit/s."
            ),
        ],
        prefill: Annotated[
            float,
            typer.Option("--prefill", metavar="TOKENS/S", help="Tokens per second to prefill."),
        ],
        like: Annotated[
            Path | None,
            typer.Option("--like", metavar="FILE", help="KV cache file: its model and prompt."),
        ] = None,
        descriptor: DescriptorOption = None,
        tokens: Annotated[
            int | None,
            typer.Option("--tokens", metavar="N", help="Length of the prompt; that of --like."),
        ] = None,
        rtt: Annotated[
            float, typer.Option("--rtt", metavar="MS", help="Round trip to the relay.")
        ] = 1.0,
        connected: Annotated[
            bool, typer.Option("--connected", help="A session to the relay is open already.")
        ] = False,
        endpoint: Annotated[
            float | None,
            typer.Option(
                "--endpoint",
                parser=rate,
                metavar="RATE",
                help="What this machine verifies; `kvcs bench` measures it. 100MB/s by default.",
            ),
        ] = None,
    ) -> None:
        """Say whether a KV cache is better fetched or computed anew.

        Where the break-even lies, too.

        An estimate; nothing is sent. Also says which block size makes the shortest fetch.
        """
        if (like is None) == (descriptor is None):
            raise UsageError("name the model with --like FILE or with --descriptor FILE")
        if like is not None:
            opened = load_kv_file(like, partial=True)
            model, length = opened.descriptor, opened.tokens if tokens is None else tokens
        elif descriptor is not None and tokens is not None:
            model, length = read_descriptor(descriptor), tokens
        else:
            raise UsageError("--descriptor FILE goes with --tokens N, the length of the prompt")
        found = plan(
            model,
            length,
            link_rate=link,
            prefill_rate=prefill,
            round_trip=rtt / 1000,
            connected=connected,
            endpoint_rate=DEFAULT_ENDPOINT_RATE if endpoint is None else endpoint,
        )
        document = {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in asdict(found).items()
        }
        if math.isinf(found.break_even_rate):
            pays = "on no link"
        else:
            pays = f"on a link of at least {rate_text(found.break_even_rate)}"
        if math.isinf(found.break_even_tokens):
            pays += "; on this link for no prompt"
        else:
            pays += f"; on this link from {found.break_even_tokens:,.0f} tokens on"
        output.result(
            document,
            [
                ("better", "fetch" if found.fetch else "recompute"),
                (
                    "fetch",
                    f"{found.fetch_seconds:.3f} s, first layer {found.first_layer_seconds:.3f} s",
                ),
                ("recompute", f"{found.recompute_seconds:.3f} s"),
                ("speedup", f"{found.speedup:.2f}"),
                ("limited by", found.limited_by),
                ("size", f"{octets_text(found.octets)} in {found.objects:,} objects"),
                ("reused tokens", f"{found.reused_tokens:,} of {found.tokens:,}"),
                ("fetching pays", pays),
                ("block tokens", f"{found.block_tokens}, now {model.block_tokens}"),
            ],
        )


def rate_text(octets: float) -> str:
    """Octets per second as bits per second, for people."""
    bits = octets * 8
    for unit in ("G", "M", "k"):
        if bits >= UNITS[unit]:
            return f"{bits / UNITS[unit]:.2f} {unit}bit/s"
    return f"{bits:.0f} bit/s"
