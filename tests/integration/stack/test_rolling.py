"""Every process of the server is restarted by SIGTERM while clients ask; a hundred restarts are a command."""

import asyncio

from epdserve.loadtest.rolling import Rolling, conversations
from support.stack import Stack


async def test_no_client_notices_that_every_process_is_restarted(stack: Stack) -> None:
    """One of each, with nobody to take over: requests wait for the next life.

    The command: ``python -m epdserve.loadtest.rolling``.
    """
    bodies = await conversations(stack.state(), 2, seed=77, max_tokens=16)
    rolling = Rolling(stack.state_file, stack.base_url, bodies)
    report = await asyncio.wait_for(rolling.run(restarts=4, clients=2), 150)
    assert report.problems() == []
    assert sorted(report.restarts) == ["decode-0", "prefill-0", "router", "store-0"]
    assert report.whole >= 4
