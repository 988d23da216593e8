"""Scenarios of the peer's interop client with a relay."""

from functools import partial

from tests.interop import peer
from tests.interop.ours import Seen
from tests.interop.relays import relay
from tests.interop.scenario import Stage
from tests.interop.steps import perform


async def interop_client(stage: Stage, whose: str, cases: list[str]) -> dict[str, Seen]:
    """Run cases of the peer's client, each with a relay of its own."""
    return await perform(stage, {case: partial(_case, stage, whose, case) for case in cases})


async def _case(stage: Stage, whose: str, name: str) -> Seen:
    async with relay(stage, whose) as url:
        client = await stage.start(peer.interop_client(url, case=name))
        finished = await client.collect()
    said = peer.parse_tap(finished.stdout)[name]
    return {"exit": finished.returncode, "passed": said.passed, "message": said.message}
