"""Layers stay until each reader of a retrieval has dropped them."""

from __future__ import annotations

import pytest

from kvcs.errors import PublicationError
from kvcs.kv import Ledger
from kvcs.moqt.names import Location
from kvcs.subscriber.kept import KeptLayers
from tests.unit.kv.toy import K0, TOY, deliver, same_place_other_bytes


def whole() -> Ledger:
    """A ledger with all of the toy."""
    ledger = TOY.ledger()
    for key, octets in TOY.objects.items():
        deliver(ledger, *key, octets)
    return ledger


def test_the_last_who_needs_a_layer_lets_it_go() -> None:
    ledger = whole()
    kept = KeptLayers(ledger)
    for reader in ("one", "other"):
        kept.join(reader)
    kept.drop("one", 0)
    assert not ledger.has_dropped
    kept.leave("other")
    kept.leave("other")
    assert ledger.has_dropped
    assert [each.index for each in ledger.ready_layers()] == [1, 2, 3]


def test_a_reader_can_leave_when_a_layer_that_another_dropped_was_contradicted_since() -> None:
    ledger = whole()
    kept = KeptLayers(ledger)
    for reader in ("one", "other"):
        kept.join(reader)
    kept.drop("one", 0)
    with pytest.raises(PublicationError):
        deliver(ledger, K0, Location(0, 0), same_place_other_bytes(TOY.objects[K0, Location(0, 0)]))
    kept.leave("other")
    assert not ledger.has_dropped
