"""The peer's subscriber reads our publisher: what it saves is what we published, octet by octet."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop import publications, relays, their_reader
from tests.interop.publications import Source
from tests.interop.steps import result
from tests.interop.their_reader import DATA, FETCHED_BLOCKS, FETCHED_LAYERS, TRACKS

Run = Callable[..., Any]
Results = dict[str, dict[str, Any]]

VIAS = [relays.DIRECT, relays.PEERS, relays.OURS]
NORMAL, END_OF_GROUP, END_OF_TRACK = 0, 3, 4
TRACK_ENDED, DOES_NOT_EXIST = 0x2, 0x10
EXIT_OK, EXIT_REFUSED = 0, 2


@pytest.fixture(scope="module", params=VIAS)
def via(request: pytest.FixtureRequest) -> str:
    """What is between our publisher and the peer."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def seen(run: Run, via: str) -> Results:
    """What came of every step."""
    results: Results = run(their_reader.everything, via=via)
    return results


def source(step: Callable[..., Any]) -> Source:
    """What a step has published."""
    return publications.small(their_reader.STEPS.index(step))


def events(seen: dict[str, Any], event: str, **members: object) -> list[dict[str, Any]]:
    """The events of one kind that have these members."""
    return [
        said
        for said in seen["events"]
        if said["event"] == event and all(said[key] == value for key, value in members.items())
    ]


def check(seen: dict[str, Any], source: Source) -> None:
    """Hold what the peer has saved of a whole publication to the draft's text and to ours."""
    assert seen["exit"] == EXIT_OK
    assert seen["saved"] == seen["published"]
    publications.check_manifest(
        seen["manifest"].encode(), source, publications.expected_tree(source)
    )
    for summary in events(seen, "summary"):
        assert all(track["conflicts"] == 0 for track in summary["tracks"].values())
    done = {said["track"]: said["status"] for said in events(seen, "done")}
    assert done == dict.fromkeys(TRACKS, TRACK_ENDED)
    layers = len(source.layers)
    for said in events(seen, "object", status=NORMAL):
        due = 0 if said["track"] == "manifest" else 128 * said["group"] // layers
        assert (said["subgroup"], said["priority"]) == (0, due), said
    assert all(said["clean"] for said in events(seen, "stream"))
    assert not events(seen, "gap")


def test_it_follows_production_from_the_start(seen: Results) -> None:
    got = result(seen, "live")
    check(got, source(their_reader.live))
    for track in DATA:
        assert not events(got, "object", via="fill", track=track)


def test_it_sees_each_group_and_the_end_of_the_track(seen: Results, via: str) -> None:
    got = result(seen, "live")
    published = source(their_reader.live)
    layers, blocks = len(published.layers), published.prefix.blocks
    for track in DATA:
        ends = sorted(
            (said["group"], said["object"], said["status"])
            for said in events(got, "object", track=track)
            if said["status"] != NORMAL
        )
        # The peer's relay tells the End of Track as an End of Group.
        last = END_OF_GROUP if via == relays.PEERS else END_OF_TRACK
        groups = [(layer, blocks, END_OF_GROUP) for layer in range(layers)]
        assert ends == [*groups, (layers, 0, last)]
        # One stream for each Group, and none more than PUBLISH_DONE counts.
        assert len(events(got, "stream", track=track)) == layers + 1
        assert events(got, "done", track=track)[0]["streams"] == layers + 1
    assert {said["object"] for said in events(got, "object", track="manifest")} == {0}


@pytest.mark.parametrize(("which", "part"), [("first", 1), ("second", 2)])
def test_two_join_in_the_middle(seen: Results, via: str, which: str, part: int) -> None:
    got = result(seen, "middle")[which]
    published = source(their_reader.middle)
    check(got, published)
    layers, blocks = len(published.layers), published.prefix.blocks
    joined = part * layers // 3
    for track in DATA:
        # LARGEST_OBJECT is the status behind the last Object of the last layer.
        assert events(got, "accepted", track=track)[0]["largest"] == [joined - 1, blocks]
        past = {said["group"] for said in events(got, "object", track=track, via="fill")}
        assert past == set(range(joined))
        live = {said["group"] for said in events(got, "object", track=track, via="live")}
        assert live >= set(range(joined, layers))
    if via != relays.PEERS:
        tracks = events(got, "summary")[0]["tracks"].values()
        assert all(track["duplicates"] == 0 for track in tracks)


def test_it_comes_after_the_end(seen: Results) -> None:
    got = result(seen, "late")
    published = source(their_reader.late)
    check(got, published)
    for track in DATA:
        largest = events(got, "accepted", track=track)[0]["largest"]
        assert largest == [len(published.layers), 0]


@pytest.mark.parametrize("what", ["layers", "blocks"])
def test_it_fetches_layers_and_blocks(seen: Results, what: str) -> None:
    got = result(seen, "fetch")[what]
    assert got["exit"] == EXIT_OK
    low, high = (0, publications.BLOCKS) if what == "layers" else FETCHED_BLOCKS
    first, last = FETCHED_LAYERS
    for track in DATA:
        wanted = [
            entry
            for entry in got["published"][track]
            if first <= entry[0] <= last and low <= entry[1] <= high
        ]
        sent = [
            [said["group"], said["object"], said["length"], said["sha256"]]
            for said in events(got, "object", track=track, via="fetch")
        ]
        assert sent == wanted, "in ascending order, and nothing that was not asked for"
        assert [said["clean"] for said in events(got, "fetch", track=track)] == [True]


def test_it_fetches_the_latest_layer_first_when_it_asks_for_that(seen: Results) -> None:
    got = result(seen, "descending")
    assert got["exit"] == EXIT_OK
    first, last = FETCHED_LAYERS
    blocks = range(source(their_reader.descending).prefix.blocks)
    for track in DATA:
        order = [(said["group"], said["object"]) for said in events(got, "object", track=track)]
        assert order == [(g, o) for g in range(last, first - 1, -1) for o in blocks]


def test_it_is_told_that_a_track_does_not_exist(seen: Results) -> None:
    got = result(seen, "absent")
    assert got["exit"] == EXIT_REFUSED
    assert [said["code"] for said in events(got, "refused")] == [DOES_NOT_EXIST]


@pytest.mark.parametrize("name", publications.real_names())
def test_it_reads_a_real_cache(seen: Results, name: str) -> None:
    check(result(seen, name), publications.real(name))
