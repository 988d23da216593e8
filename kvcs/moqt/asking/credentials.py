"""The token that requests of this endpoint carry (MOQT §8.9)."""

from __future__ import annotations

from dataclasses import replace

from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.requests import RequestMessage
from kvcs.moqt.tokens import ResolvedToken, Token


class Credentials:
    """Adds a token to every request, where there is one.

    A token of SETUP holds for the whole session, but it cannot be replaced. Once it is about to
    expire, each request carries its own.
    """

    def __init__(self) -> None:
        self.token: ResolvedToken | None = None
        """What requests carry from now on; None where that of SETUP is enough."""

    def parameters(self, parameters: Parameters) -> Parameters:
        """A request's parameters with the token; one that is there already stays alone."""
        token = self.token
        if token is None or ParameterType.AUTHORIZATION_TOKEN in parameters:
            return parameters
        return parameters.replace(
            authorization_token=Token.use_value(token.value, token.token_type)
        )

    def added(self, message: RequestMessage) -> RequestMessage:
        """A request's message with the token."""
        if self.token is None:
            return message
        return replace(message, parameters=self.parameters(message.parameters))
