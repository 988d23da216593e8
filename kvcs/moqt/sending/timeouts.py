"""Delivery timeouts: how late an Object or a Subgroup may still be sent (MOQT §5.2)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues, Property, find_property
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import Subgroup


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which what was not handed over is given up; None for no limit."""

    object: float | None = None
    """From the Object's header on."""

    subgroup: float | None = None
    """From the moment at which the whole Subgroup was published."""

    @property
    def datagram(self) -> float | None:
        """For an Object that goes as a datagram: the smaller of both."""
        return _smaller(self.object, self.subgroup)


@dataclass(frozen=True, slots=True)
class AskedTimeouts:
    """What a subscriber asks for, in milliseconds; 0 for nothing."""

    object_ms: int = 0
    subgroup_ms: int = 0

    def updated(self, parameters: Parameters) -> AskedTimeouts:
        """What holds after a SUBSCRIBE or REQUEST_UPDATE; absent means unchanged."""
        return AskedTimeouts(
            parameters.get(ParameterType.OBJECT_DELIVERY_TIMEOUT, self.object_ms),
            parameters.get(ParameterType.SUBGROUP_DELIVERY_TIMEOUT, self.subgroup_ms),
        )

    def of(self, track: Track, subgroup: Subgroup) -> Timeouts:
        """The timeouts of a Subgroup: of the publisher's value and the subscriber's the smaller.

        The publisher's is in the Properties of the Subgroup's first Object, else the Track's. That
        of an Object does not count among its immutable properties: there the same number is the Key
        ID of Secure Objects.
        """
        first = KeyValues()
        if subgroup.from_start and subgroup.objects and subgroup.objects[0].header.properties:
            first = KeyValues.decode(subgroup.objects[0].header.properties)
        open_first = KeyValues(
            tuple(item for item in first.items if item[0] != Property.IMMUTABLE_PROPERTIES)
        )
        return Timeouts(
            _effective(
                self.object_ms, (open_first, track.properties), Property.OBJECT_DELIVERY_TIMEOUT
            ),
            _effective(
                self.subgroup_ms, (first, track.properties), Property.SUBGROUP_DELIVERY_TIMEOUT
            ),
        )


def _effective(asked_ms: int, sources: tuple[KeyValues, ...], which: Property) -> float | None:
    values = (find_property(properties, which) for properties in sources)
    named = next((value for value in values if isinstance(value, int)), 0)
    return _smaller(asked_ms / 1000 or None, named / 1000 or None)


def _smaller(a: float | None, b: float | None) -> float | None:
    return min((value for value in (a, b) if value is not None), default=None)
