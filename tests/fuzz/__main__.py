"""Coverage-guided fuzzing of one target with atheris; `scripts/fuzz` runs it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    """Fuzz for a time, and say how many inputs ran; a crash ends the run with its input."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("target", help="what to fuzz; 'list' shows the names")
    parser.add_argument("--seconds", type=int, default=60, help="how long (60)")
    parser.add_argument("--seed", type=int, default=1, help="start of the random choices (1)")
    parser.add_argument("--corpus", type=Path, help="folder to keep what reached new code in")
    options = parser.parse_args()
    with atheris.instrument_imports(include=["kvcs.moqt", "kvcs.kv", "kvcs.errors"]):
        from tests.fuzz.targets import TARGETS, corpus
    if options.target not in TARGETS:
        names = "\n".join(TARGETS)
        if options.target == "list":
            print(names)
            return
        parser.error(f"no target {options.target!r}; there are\n{names}")
    target = TARGETS[options.target]
    with tempfile.TemporaryDirectory(prefix="kvcs-fuzz-") as scratch:
        grown = options.corpus or Path(scratch) / "grown"
        seeds = Path(scratch) / "seeds"
        for folder in (grown, seeds):
            folder.mkdir(parents=True, exist_ok=True)
        for number, octets in enumerate(corpus(options.target)):
            (seeds / f"{number:05}").write_bytes(octets)
        arguments = [
            sys.argv[0],
            str(grown),
            str(seeds),
            f"-max_total_time={options.seconds}",
            f"-seed={options.seed}",
            "-max_len=16384",
            "-timeout=20",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
            f"-artifact_prefix={Path.cwd()}/",
        ]
        atheris.Setup(arguments, target)
        atheris.Fuzz()


main()
