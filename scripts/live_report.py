"""What `scripts/live.py` prints: when each layer was where, and what the stream was worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from live import Heard

ROWS_SHOWN = 8
"""Layers of the timeline that are printed, about."""


@dataclass(frozen=True, slots=True)
class Run:
    """What was heard of the processes. Times are seconds since 1970."""

    ready: dict[str, Any]
    """The producer's first event."""

    fault: str | None
    """What was made to go wrong."""

    begun: float
    """When the producer had the prompt."""

    asked: float
    """When the consumer had it: later only for one that took the place of another."""

    produced: Heard
    """The producer's prefill and answer."""

    followed: Heard
    """The consumer's answer as it followed the prefill."""

    recomputed: Heard
    """Its answer without the cache."""

    timed: Heard | None
    """The prompt computed as fast as it can be."""

    late: Heard | None
    """The consumer's answer from the complete cache."""


def document(run: Run) -> dict[str, Any]:
    """Everything that was measured, as JSON."""
    produced, followed, timed, late = run.produced, run.followed, run.timed, run.late
    blocks, left_over = divmod(run.ready["tokens"], run.ready["block_tokens"])
    answers = {
        "consumer": followed.fact("answered", "token_ids"),
        "recompute": run.recomputed.fact("answered", "token_ids"),
    }
    if not produced.died and run.fault != "other-model":
        answers["producer"] = produced.fact("answered", "token_ids")
    if late is not None:
        answers["late"] = late.fact("answered", "token_ids")
    return {
        "tokens": run.ready["tokens"],
        "blocks": blocks,
        "tokens_left_over": left_over,
        "fault": run.fault,
        "producer": {
            "killed": produced.died,
            "error": produced.fact("not_published", "error"),
            "reason": produced.fact("not_published", "reason"),
            "octets": produced.fact("published", "octets"),
            "first_token_seconds": _since(produced.at("first_token"), run.begun),
            "text": produced.fact("answered", "text"),
        },
        "consumer": {
            "restarted": run.asked != run.begun,
            **_consumer(followed, run.asked),
        },
        "late": None if late is None else _consumer(late, late.at("following")),
        "recompute": {
            "first_token_seconds": timed and _since(timed.at("first_token"), timed.at("computing")),
            "text": run.recomputed.fact("answered", "text"),
        },
        "timeline": _layers(run),
        "answers_compared": sorted(answers),
        "same": len({tuple(tokens) for tokens in answers.values()}) == 1,
    }


def _consumer(heard: Heard, begun: float | None) -> dict[str, Any]:
    return {
        "how": heard.fact("answered", "how"),
        "error": heard.fact("recomputing", "error"),
        "reason": heard.fact("recomputing", "reason"),
        "first_token_seconds": _since(heard.at("first_token"), begun),
        "text": heard.fact("answered", "text"),
    }


def _layers(run: Run) -> list[dict[str, int | None]]:
    times = {
        "computed_ms": run.produced.layers("layer_computed"),
        "verified_ms": run.followed.layers("layer_verified"),
        "in_use_ms": run.followed.layers("layer_in_use"),
    }
    return [
        {
            "layer": layer,
            **{name: _milliseconds(when.get(layer), run.begun) for name, when in times.items()},
        }
        for layer in sorted(set().union(*times.values()))
    ]


def exit_code(result: dict[str, Any]) -> int:
    """0 the same answers and streamed, 1 different ones, 3 the same but recomputed."""
    if not result["same"]:
        return 1
    late = result["late"]
    streamed = result["consumer"]["how"] == "streamed" and (not late or late["how"] == "streamed")
    return 0 if streamed else 3


def lines(result: dict[str, Any]) -> list[str]:
    """The same for people."""
    return [*_timeline(result), *_times(result), *_answers(result)]


def _timeline(result: dict[str, Any]) -> list[str]:
    rows = result["timeline"]
    if not rows:
        return []
    shown = rows[:: max(1, len(rows) // ROWS_SHOWN)]
    if rows[-1] not in shown:
        shown.append(rows[-1])
    text = ["layer  computed  verified    in use   (ms since the producer had the prompt)"]
    for row in shown:
        cells = (row["computed_ms"], row["verified_ms"], row["in_use_ms"])
        text.append(f"{row['layer']:>5}" + "".join(f"{_cell(cell):>10}" for cell in cells))
    last = max(row["computed_ms"] for row in rows if row["computed_ms"] is not None)
    before = sum(1 for row in rows if row["verified_ms"] is not None and row["verified_ms"] < last)
    if before:
        text.append(
            f"The consumer had verified {before} layers when the producer had computed its"
            f" {len(rows)}th."
        )
    return [*text, ""]


def _times(result: dict[str, Any]) -> list[str]:
    producer, consumer, late = result["producer"], result["consumer"], result["late"]
    rows: list[tuple[float | None, str]] = [
        (producer["first_token_seconds"], "the producer"),
        (consumer["first_token_seconds"], _how(consumer, "following the prefill")),
        (
            late and late["first_token_seconds"],
            "" if late is None else _how(late, "taking the complete cache"),
        ),
        (result["recompute"]["first_token_seconds"], "the consumer, without any cache"),
    ]
    return [
        f"prompt: {result['tokens']} tokens, {result['blocks']} whole blocks and"
        f" {result['tokens_left_over']} tokens left over",
        "time to the first token",
        *(f"{seconds:8.2f} s  {who}" for seconds, who in rows if seconds is not None),
        "",
    ]


def _how(consumer: dict[str, Any], streamed: str) -> str:
    who = "another consumer, started" if consumer.get("restarted") else "the consumer,"
    if consumer["how"] != "streamed":
        return f"{who} having to recompute"
    return f"{who} in the place of the first" if consumer.get("restarted") else f"{who} {streamed}"


def _answers(result: dict[str, Any]) -> list[str]:
    producer, consumer = result["producer"], result["consumer"]
    text = []
    if producer["killed"]:
        text.append("producer   was killed in mid-prefill")
    elif producer["text"] is not None:
        text.append(f"producer   {producer['text']}")
    if producer["error"]:
        text.append(f"           published nothing: {producer['error']}: {producer['reason']}")
    if consumer["error"]:
        text.append(f"consumer   recomputed: {consumer['error']}: {consumer['reason']}")
    text.append(f"consumer   {consumer['text']}")
    text.append(f"recompute  {result['recompute']['text']}")
    if result["fault"] == "other-model":
        text.append("           (by a model with fewer layers, which answers by its own lights)")
    if result["late"] is not None:
        text.append(f"late       {result['late']['text']}")
    compared = ", ".join(result["answers_compared"])
    verdict = "the same, token by token" if result["same"] else "DIFFERENT"
    text.append(f"verdict    {verdict} ({compared})")
    return text


def _cell(value: int | None) -> str:
    return "-" if value is None else str(value)


def _since(when: float | None, begun: float | None) -> float | None:
    return None if when is None or begun is None else round(when - begun, 4)


def _milliseconds(when: float | None, zero: float) -> int | None:
    return None if when is None else round((when - zero) * 1000)
