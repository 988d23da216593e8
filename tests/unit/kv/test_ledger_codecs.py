"""Objects of a codec that decodes: kept aside first, dropped where they do not decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcs.errors import ObjectError
from kvcs.kv import (
    HEADER_OCTETS,
    RAW,
    BlockLayout,
    Component,
    Outcome,
    register,
)
from tests.unit.kv.toy import (
    AT,
    DATA_OCTETS,
    deliver,
    fill,
    started,
    toy_publication,
)


class Flip:
    """Inverts every bit, marks the end, and can be told to fail."""

    name, number, lossless, in_place = "flip", 0xFF02, True, False
    mode = ""

    def data_octets(self, layout: BlockLayout) -> int | None:
        return None

    def encode(self, sections: Any, layout: BlockLayout) -> list[bytes]:
        joined = b"".join(RAW.encode(sections, layout))
        return [bytes(255 - octet for octet in joined), b"end"]

    def decode(self, data: memoryview, layout: BlockLayout) -> list[bytes]:
        if self.mode == "raise":
            raise ZeroDivisionError("codec bug")
        plain = bytes(255 - octet for octet in data[:-3])
        if self.mode == "short":
            plain = plain[:-1]
        if self.mode == "sections":
            return [plain[:1], plain[1:]]
        return [bytes(part) for part in RAW.decode(memoryview(plain), layout)]


@pytest.fixture
def flip(own_codecs: None) -> Flip:
    codec = Flip()
    register(codec)
    return codec


@pytest.mark.usefixtures("flip")
def test_a_coded_publication_gives_the_same_tensors() -> None:
    toy = toy_publication(codec="flip")
    ledger = toy.ledger(signed=True)
    fill(ledger, toy)
    ledger.apply_manifest(toy.writer().manifest())
    assert ledger.complete
    assert np.array_equal(ledger.layer(3).v, toy.v[3])
    joint = toy_publication(codec="flip", components=[Component.KV])
    ledger = joint.ledger()
    fill(ledger, joint)
    assert np.array_equal(ledger.layer(0).k, joint.k[0])


@pytest.mark.parametrize("mode", ["raise", "short", "sections"])
def test_what_does_not_decode_is_a_missing_object(mode: str, flip: Flip) -> None:
    toy = toy_publication(codec="flip")
    ledger = toy.ledger()
    track = toy.segments[0][0]
    flip.mode = mode
    with pytest.raises(ObjectError) as caught:
        deliver(ledger, track, AT, toy.objects[track, AT])
    assert caught.value.check == "codec"
    assert ledger.counters.rejected == {"codec": 1}
    assert ledger.counters.verified == 0
    flip.mode = ""
    assert deliver(ledger, track, AT, toy.objects[track, AT]) is Outcome.VERIFIED


@pytest.mark.usefixtures("flip")
def test_coded_data_is_bounded() -> None:
    toy = toy_publication(codec="flip")
    ledger = toy.ledger(max_data_octets=DATA_OCTETS + 3)
    fill(ledger, toy)
    assert ledger.whole
    with pytest.raises(ObjectError) as caught:
        ledger.begin(toy.segments[0][0], AT, HEADER_OCTETS + DATA_OCTETS + 4)
    assert caught.value.check == "length"


@pytest.mark.usefixtures("flip")
def test_two_coded_copies_at_once() -> None:
    toy = toy_publication(codec="flip")
    ledger, track = toy.ledger(), toy.segments[0][0]
    payload = toy.objects[track, AT]
    first, second = (started(ledger, payload, track) for _ in range(2))
    first.write(payload[:90])
    second.write(payload)
    assert second.finish() is Outcome.VERIFIED
    first.write(payload[90:])
    assert first.finish() is Outcome.DUPLICATE
    assert ledger._aside == {} and ledger.filling == 0
