"""Shows messages the way `vectors/moqt20-compatible/messages.json` writes them."""

from __future__ import annotations

from typing import Any

from kvcs.moqt import messages as m
from kvcs.moqt.filters import RangeFilter
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.tokens import Token
from tests.unit.moqt.rendering import (
    show_message,
    show_octets,
    show_options,
    show_parameters,
    show_range_filter,
    show_token,
)


def without_names(shown: Any) -> Any:
    """The draft-20 corpus does not name the types of Properties."""
    if isinstance(shown, dict):
        return {k: without_names(v) for k, v in shown.items() if k != "name"}
    return [without_names(v) for v in shown] if isinstance(shown, list) else shown


def _parameters_by_type(parameters: Parameters) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for type_, value in parameters.items:
        if isinstance(value, Token):
            shown[str(int(type_))] = _without_name(show_token(value))
        elif isinstance(value, Parameters):
            shown[str(int(type_))] = _parameters_by_type(value)
        elif isinstance(value, RangeFilter):
            entry = {"property_type": None, **show_range_filter(value)}
            shown.setdefault(str(int(type_)), []).append(entry)
        else:
            shown[str(int(type_))] = show_parameters(Parameters(((type_, value),)))[0]["value"]
    return shown


def _without_name(token: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in token.items() if key != "alias_type_name"}


_LIFTED = {
    "expires": ParameterType.EXPIRES,
    "forward": ParameterType.FORWARD,
    "subscriber_priority": ParameterType.SUBSCRIBER_PRIORITY,
    "group_order": ParameterType.GROUP_ORDER,
}


def show_old_message(message: m.Message) -> dict[str, Any]:
    """Show a message the way the draft-22 decoder behind that corpus does."""
    shown = show_message(message)
    parameters = getattr(message, "parameters", Parameters())
    by_type = _parameters_by_type(parameters)
    properties = getattr(message, "track_properties", KeyValues())
    for name, type_ in _LIFTED.items():
        if str(int(type_)) in by_type:
            shown[name] = by_type.pop(str(int(type_)))
    largest = parameters.get(ParameterType.LARGEST_OBJECT)
    if largest is not None:
        by_type.pop("9")
        shown["largest_group"], shown["largest_object"] = largest
    if by_type:
        shown["params_by_type"] = by_type
    if isinstance(message, m.SubscribeOk):
        shown["group_order"] = properties.integer(0x22, 1)
        others = [(t, v) for t, v in properties.items if t != 0x22]
        if others:
            shown["track_properties"] = {
                str(t): v if isinstance(v, int) else {"hex": v.hex()} for t, v in others
            }
        else:
            shown.pop("track_properties")
    if isinstance(message, m.Setup):
        options = {
            str(option["type"]): _without_name(option["value"])
            if isinstance(option["value"], dict)
            else option["value"]
            for option in show_options(message.options)
        }
        shown["options"] = options
        if not options:
            shown.pop("options")
    if isinstance(message, m.RequestError) and message.redirect is not None:
        redirect = message.redirect
        shown["redirect"] = [
            redirect.connect_uri,
            [show_octets(field) for field in redirect.track_namespace],
            show_octets(redirect.track_name),
        ]
    renamed = {"track_namespace_suffix": "namespace_suffix", "timeout_ms": "timeout"}
    shown = {renamed.get(key, key): value for key, value in shown.items()}
    return {k: v for k, v in shown.items() if k not in ("message_type", "params")}
