"""Control messages as frames, Type, Length and body (MOQT §9), and the stream that they come on."""

from __future__ import annotations

from collections.abc import Collection

from kvcs.errors import SessionError, UsageError
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.messages import Message
from kvcs.moqt.wire import (
    FIELDS,
    MAX_MESSAGE_BODY,
    MESSAGES,
    TYPE_IDS,
    NeedMore,
    Octets,
    Reader,
    encode_vi64,
)


def encode_message(message: Message) -> bytes:
    """Encode a control message as a whole frame: Type, Length, body (§9).

    Raises:
        UsageError: a field is out of its bounds, or the body is above 65535 octets.
    """
    cls = type(message)
    check = getattr(message, "check", None)
    if check is not None:
        try:
            check()
        except SessionError as exc:
            raise UsageError(f"{cls.__name__}: {exc.reason}") from exc
    body = b"".join([kind.write(getattr(message, name)) for name, kind in FIELDS[cls]])
    if len(body) > MAX_MESSAGE_BODY:
        raise UsageError(f"{cls.__name__} of {len(body)} octets, limit {MAX_MESSAGE_BODY}")
    return encode_vi64(TYPE_IDS[cls]) + len(body).to_bytes(2, "big") + body


def decode_body(type_id: int, body: Octets) -> Message:
    """Decode the body of a control message, which has to be used up exactly (§9).

    Raises:
        SessionError: the type is unknown, the body is too short or too long, or a field is bad.
    """
    cls = MESSAGES.get(type_id)
    if cls is None:
        raise ProtocolViolation(f"unknown message type {type_id:#x}")
    reader = Reader(body)
    try:
        values = [kind.read(reader) for _, kind in FIELDS[cls]]
    except NeedMore as exc:
        raise ProtocolViolation(f"{cls.__name__}: its Length ends inside a field") from exc
    except ProtocolViolation as exc:
        raise ProtocolViolation(f"{cls.__name__}: {exc.reason}") from exc
    if reader.pos != reader.end:
        raise ProtocolViolation(f"{cls.__name__}: {reader.remaining} octets behind the last field")
    decoded: Message = cls(*values)
    check = getattr(decoded, "check", None)
    if check is not None:
        check()
    return decoded


class MessageReader:
    """Cuts one direction of a control or request stream into messages, however it arrives.

    Args:
        first: message types that may come first; None for any. A request stream begins with a
            request, a control stream with SETUP (§6.4).
        later: message types that may follow; None for any.

    It holds at most one message's frame.
    """

    def __init__(
        self, first: Collection[int] | None = None, later: Collection[int] | None = None
    ) -> None:
        self._allowed = first
        self._later = later
        self._pending = bytearray()
        self._broken: SessionError | None = None

    @property
    def pending(self) -> bool:
        """Whether the last message is cut; a FIN now is a violation (§6.4)."""
        return bool(self._pending)

    @property
    def buffered(self) -> int:
        """Octets held of a message that is not whole."""
        return len(self._pending)

    def feed(self, data: Octets) -> list[Message]:
        """Take the next octets of the stream and return the messages they complete.

        What came before a message that breaks a rule counts: it is returned, and the caller hands
        it on before `check` raises for the broken one.

        Raises:
            SessionError: as soon as a message's type is known to be wrong, and for a bad body,
                where no good message comes before it.
        """
        self.check()
        messages: list[Message] = []
        self._pending += data
        reader = Reader(self._pending)
        done = 0
        try:
            while True:
                type_id = reader.vi64()
                self._check_type(type_id)
                body = reader.take(reader.uint16())
                messages.append(decode_body(type_id, body))
                self._allowed = self._later
                done = reader.pos
        except NeedMore:
            del self._pending[:done]
        except SessionError as exc:
            self._pending.clear()
            self._broken = exc
            if not messages:
                raise
        return messages

    def check(self) -> None:
        """Raise the `SessionError` of a broken message behind those that were returned."""
        if self._broken is not None:
            raise self._broken

    def _check_type(self, type_id: int) -> None:
        if type_id not in MESSAGES:
            raise ProtocolViolation(f"unknown message type {type_id:#x}")
        if self._allowed is not None and type_id not in self._allowed:
            raise ProtocolViolation(f"{MESSAGES[type_id].__name__} does not belong here")
