"""The commands on the network as processes: what they print, and that it is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import kvcs
from tests.cli.conftest import BLOCK_TOKENS, LAYERS, Place, RunningRelay, make_cache
from tests.command import Process, Ran, Run, came_once


def ran(*arguments: object) -> Ran:
    """Run a command that ends by itself, as a process."""
    with Process(*arguments) as process:
        return process.end()


def same(path: Path, other: Path, layers: range = range(LAYERS), tokens: int = 16) -> bool:
    mine, its = (kvcs.load_kv_file(each, partial=True) for each in (path, other))
    assert list(mine.layers) == list(layers)
    assert mine.tokens == tokens
    return all(
        np.array_equal(part, whole[:tokens])
        for layer in layers
        for part, whole in zip(mine.layers[layer], its.layers[layer], strict=True)
    )


def test_a_consumer_that_waits_gets_each_layer_as_it_is_published(
    place: Place, relay: RunningRelay, tmp_path: Path
) -> None:
    there = ("--relay", relay.url, *place.member)
    out = tmp_path / "out.safetensors"
    with (
        Process(
            "subscribe",
            *there,
            "--like",
            place.cache,
            "--out",
            out,
            "--compare",
            place.cache,
            "--lines",
        ) as consumer,
        Process("publish", place.cache, *there, "--pace", "0.02", "--lines") as producer,
    ):
        announced = producer.event("announced")
        assert announced["uri"].startswith(f"{relay.url}#kvcs:kvcs.2d1-.")
        assert announced["blocks"] == 4
        published = producer.event("published")
        assert (published["layers"], published["blocks"], published["tokens"]) == (LAYERS, 4, 16)
        assert (published["tokens_left_over"], published["objects"]) == (3, 2 * 4 * LAYERS)
        got = consumer.end()
        assert (got.code, got.err) == (0, "")
        stopped, _ = producer.stop()
    assert (stopped.code, stopped.err) == (143, "")
    events = got.lines()
    assert [event["event"] for event in events] == [
        "opened",
        *["layer_verified"] * LAYERS,
        "retrieved",
    ]
    assert [event["layer"] for event in events[1:-1]] == list(range(LAYERS))
    assert all(before["at"] <= after["at"] for before, after in pairwise(events))
    retrieved = events[-1]
    assert retrieved["equal"] is True
    assert (retrieved["tokens"], retrieved["layers"]) == (16, LAYERS)
    assert retrieved["objects"] == 2 * 4 * LAYERS and came_once(retrieved)
    assert retrieved["rejected"] == {}
    assert retrieved["file"] == str(out)
    assert same(out, place.cache)


@pytest.fixture(scope="module")
def published(place: Place, relay: RunningRelay) -> Iterator[str]:
    """Holder URI of the cache, which is published while the module's tests run."""
    with Process(
        "publish", place.cache, "--relay", relay.url, *place.member, "--lines"
    ) as producer:
        uri = producer.event("announced")["uri"]
        producer.event("published")
        yield uri


def test_subscribe_in_json(place: Place, relay: RunningRelay, published: str) -> None:
    got = ran(
        "subscribe",
        "--relay",
        relay.url,
        *place.member,
        "--like",
        place.cache,
        "--compare",
        place.cache,
        "--json",
    )
    assert (got.code, got.err) == (0, "")
    document = got.json()
    assert document["equal"] is True
    assert document["tracks"] == ["k.raw.s0", "v.raw.s0"]
    assert document["publication"] in ran_publications(place, relay)
    assert document["goodput_octets_per_second"] > 0


def ran_publications(place: Place, relay: RunningRelay) -> list[str]:
    got = ran("ls", "--relay", relay.url, *place.member, "--like", place.cache, "--json")
    assert (got.code, got.err) == (0, "")
    return [row["publication"] for row in got.json()]


def test_fetch_of_a_part(place: Place, relay: RunningRelay, published: str, tmp_path: Path) -> None:
    out = tmp_path / "part.safetensors"
    got = ran(
        "fetch",
        "--relay",
        relay.url,
        *place.member,
        "--like",
        place.cache,
        "--out",
        out,
        "--layers",
        "2-4",
        "--blocks",
        "0-1",
    )
    assert (got.code, got.err) == (0, "")
    facts = dict(line.split("  ", 1) for line in got.out.splitlines())
    assert facts["layers"].strip() == "3"
    assert facts["tokens"].strip() == "8"
    assert facts["file"].strip() == str(out)
    assert same(out, place.cache, range(2, 5), 2 * BLOCK_TOKENS)


def test_tokens_and_descriptor_name_the_prefix_as_well(
    place: Place, relay: RunningRelay, published: str, tmp_path: Path, run: Run
) -> None:
    there = ("--relay", relay.url, *place.member)
    words = tmp_path / "tokens.txt"
    words.write_text("\n".join(map(str, kvcs.load_kv_file(place.cache).token_ids)))
    for tokens in (place.tokens, words):
        named = ("--tokens", tokens, "--descriptor", place.descriptor)
        out = tmp_path / "named.safetensors"
        got = run("fetch", *there, *named, "--out", out, "--compare", place.cache, "--json")
        assert (got.code, got.err, got.json()["equal"]) == (0, "", True)
        assert same(out, place.cache)
        assert len(run("ls", *there, *named, "--json").json()) == 1


def test_ls_lists_what_fetch_can_take(
    place: Place, relay: RunningRelay, published: str, tmp_path: Path, run: Run
) -> None:
    there = ("--relay", relay.url, *place.member)
    got = run("ls", *there)
    assert (got.code, got.err) == (0, "")
    columns, *rows = [line.split("\t") for line in got.out.splitlines()]
    assert columns == ["publication", "compat_id", "anchor_key", "uri"]
    assert published in [row[3] for row in rows]
    out = tmp_path / "out.safetensors"
    like = ("--like", place.cache, "--out", out)
    assert run("fetch", *there, *like, "--publication", published).code == 0
    assert same(out, place.cache)
    other = make_cache(tmp_path / "other.safetensors", seed=2)
    nothing = run("ls", *there, "--like", other)
    assert (nothing.code, nothing.out.splitlines()) == (0, ["\t".join([*columns, "tokens"])])
    assert run("ls", *there, "--like", other, "--json").json() == []


def test_a_longer_prompt_gets_what_it_shares(
    place: Place, relay: RunningRelay, published: str, tmp_path: Path, run: Run
) -> None:
    ours = kvcs.load_kv_file(place.cache)
    longer = tmp_path / "longer.json"
    longer.write_text(json.dumps([*map(int, ours.token_ids[:16]), *range(900, 916)]))
    named = ("--tokens", longer, "--descriptor", place.descriptor)
    there = ("--relay", relay.url, *place.member, *named)
    out = tmp_path / "shared.safetensors"
    got = run("fetch", *there, "--out", out, "--anchors", "4")
    assert (got.code, got.err) == (0, "")
    facts = dict(line.split("  ", 1) for line in got.out.splitlines())
    assert (facts["tokens"].strip(), facts["to compute"].strip()) == ("16", "16 tokens")
    assert same(out, place.cache)
    rows = run("ls", *there, "--json").json()
    assert [row["tokens"] for row in rows if row["uri"] == published] == [16]
    for arguments, says in [
        (("--probe", "0"), "no publication of the prefix"),
        (("--anchors", "8"), "an anchor is shorter than the prefix of 8 blocks"),
        (("--anchors", "four"), "--anchors: expected numbers of blocks"),
    ]:
        refused = run("fetch", *there, "--out", tmp_path / "none.safetensors", *arguments)
        assert refused.code == 2
        assert says in refused.line()


@pytest.mark.slow
def test_a_longer_publication_is_found_through_an_index(
    place: Place, relay: RunningRelay, tmp_path: Path, run: Run
) -> None:
    theirs = make_cache(tmp_path / "theirs.safetensors", seed=7)
    shelf = tmp_path / "index"
    shelf.mkdir()
    there = ("--relay", relay.url, *place.member)
    shorter = tmp_path / "shorter.json"
    shorter.write_text(json.dumps(kvcs.load_kv_file(theirs).token_ids[:10].tolist()))
    named = ("--tokens", shorter, "--descriptor", place.descriptor)
    out = tmp_path / "out.safetensors"
    entry = shelf / "one.json"
    with Process("publish", theirs, *there, "--index-out", entry, "--lines") as producer:
        uri = producer.event("published")["uri"]
        assert [each["uri"] for each in json.loads(entry.read_text())["publications"]] == [uri]
        for where in (shelf, entry):
            got = run(
                *("fetch", *there, *named, "--index", where, "--probe", "0", "--whole"),
                *("--out", out, "--compare", theirs, "--json"),
            )
            assert (got.code, got.err, got.json()["equal"]) == (0, "", True)
            assert (got.json()["tokens"], got.json()["believed"]) == (8, False)
            assert same(out, theirs, tokens=8)
        assert run("fetch", *there, *named, "--out", out).code == 2  # nothing else leads to it
        producer.stop()
    assert not entry.exists()  # it went with the publication
    for wrong, why in (
        (("fetch", *there, *named, "--index", tmp_path / "none", "--out", out), "no such file"),
        (
            ("publish", theirs, *place.member, "--save", shelf, "--index-out", entry),
            "--index-out needs --relay or --serve",
        ),
        (("publish", theirs, *there, "--index-out", shelf), "a folder"),
        (
            ("fetch", *there, *named, "--patience", "0", "--out", out),
            "patience must be more than 0",
        ),
    ):
        refused = run(*wrong)
        assert refused.code == 2
        assert why in refused.line()


def test_a_publication_says_what_it_is(
    place: Place, relay: RunningRelay, published: str, run: Run, tmp_path: Path
) -> None:
    ca = ("--ca", place.pem.ca)
    got = ran("inspect", published, *ca, "--json")
    assert (got.code, got.err) == (0, "")
    document = got.json()
    descriptor = kvcs.load_kv_file(place.cache).descriptor
    assert document["compat"] == descriptor.to_json()
    assert document["compat_id_verified"] is True
    assert (document["layers"], document["blocks"], document["tokens"]) == (LAYERS, 4, 16)
    assert document["octets"] == LAYERS * 16 * 2 * (8 + 8) * 2
    assert document["complete"] is True
    [segment] = document["segments"]
    assert segment["tracks"] == ["k.raw.s0", "v.raw.s0"]
    assert (segment["first_block"], segment["blocks"]) == (0, 4)
    assert (segment["layers_listed"], segment["complete"]) == (LAYERS, True)
    assert "scope_is_ours" not in document

    ours = run("inspect", published, *place.member, "--like", place.cache, "--json").json()
    assert (ours["scope_is_ours"], ours["tokens_of_prefix"]) == (True, 16)
    facts = dict(
        line.split("  ", 1)
        for line in run("inspect", published, *place.member, "--like", place.cache).out.splitlines()
    )
    facts = {label: value.strip() for label, value in facts.items()}
    assert facts["scope id"].endswith(" (ours)")
    assert facts["of the prefix"] == "16 tokens in 4 blocks"
    assert facts["complete"] == "yes"
    assert facts["segment 0"] == "blocks 0-3, k.raw.s0 v.raw.s0, 6 of 6 layers listed"

    key = tmp_path / "other.key"
    run("keygen", "--out", key)
    foreign = run("inspect", published, *ca, "--scope-key-file", key)
    assert (foreign.code, "NOT that of the scope key" in foreign.out) == (0, True)


def test_a_publication_that_is_not_the_prefixs_is_told(
    place: Place, relay: RunningRelay, published: str, run: Run, tmp_path: Path
) -> None:
    key = tmp_path / "other.key"
    run("keygen", "--out", key)
    other = make_cache(tmp_path / "other.safetensors", seed=2)
    wide = make_cache(tmp_path / "wide.safetensors", dtype="float32")
    ca = ("--ca", place.pem.ca)
    for arguments, says in [
        ((*ca, "--like", place.cache), "add --scope-key-file"),
        ((*ca, "--like", place.cache, "--scope-key-file", key), "the publication is of scope"),
        ((*place.member, "--like", other), "block_keys_sha256"),
        ((*place.member, "--like", wide), "dtype: ours float32, theirs float16"),
        ((*place.member, "--tokens", place.tokens), "--descriptor FILE"),
        ((*ca, "--deadline", "0"), "deadline must be more than 0 s"),
    ]:
        got = run("inspect", published, *arguments)
        assert (got.code, got.out) == (2, ""), arguments
        assert says in got.line()
    for uri, says in [
        (relay.url, "is not a holder URI"),
        (f"{published}aa", "field 4 has 18 octets"),
        (f"{published.rpartition('-')[0]}-{'zz' * 8}", "refused: nobody publishes"),
    ]:
        got = run("inspect", uri, *ca)
        assert (got.code, got.out) == (2, "")
        assert says in got.line()
    got = run("inspect", place.cache, "--like", place.cache)
    assert (got.code, got.out) == (2, "")
    assert "this is a file" in got.line()


def test_publish_without_a_relay(place: Place, tmp_path: Path, run: Run) -> None:
    with Process(
        "publish",
        place.cache,
        "--serve",
        "127.0.0.1:0",
        *place.keys,
        "--scope-key-file",
        place.scope_key,
        "--lines",
    ) as producer:
        uri = producer.event("announced")["uri"]
        producer.event("published")
        url = uri.partition("#")[0]
        out = tmp_path / "out.safetensors"
        got = run(
            "subscribe",
            "--relay",
            url,
            *place.member,
            "--like",
            place.cache,
            "--out",
            out,
        )
        assert (got.code, got.err) == (0, "")
        assert same(out, place.cache)
        assert run("inspect", uri, *place.member, "--json").json()["complete"] is True
        stopped, seconds = producer.stop()
    assert (stopped.code, stopped.err) == (143, "")
    assert seconds < 20.0


def test_publish_leaves_when_its_time_is_up(place: Place, relay: RunningRelay, run: Run) -> None:
    there = ("--relay", relay.url, *place.member)
    before = len(run("ls", *there, "--json").json())
    got = run("publish", place.cache, *there, "--retain", "0", "--json")
    assert (got.code, got.err) == (0, "")
    document = got.json()
    assert (document["layers"], document["objects"]) == (LAYERS, 2 * 4 * LAYERS)
    assert document["manifest_versions"] >= 2
    said = run("publish", place.cache, *there, "--retain", "0")
    assert said.code == 0
    assert said.line().startswith("kvcs: announced moqt://")
    assert "16 in 4 blocks" in said.out
    assert len(run("ls", *there, "--json").json()) == before, "both are withdrawn"
