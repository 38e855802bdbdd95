"""Many concurrent requests are spread over few clients."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

import httpx

from primeslurm.wire.transport.http import Clients


def test_requests_are_spread_over_clients() -> None:
    made: list[httpx.AsyncClient] = []

    def make() -> httpx.AsyncClient:
        made.append(httpx.AsyncClient(verify=False))
        return made[-1]

    async def spread() -> None:
        clients, source = Clients(make, at_once=4), random.Random(0)
        lent: list[tuple[ExitStack, httpx.AsyncClient]] = []
        for _ in range(100):
            stack = ExitStack()
            lent.append((stack, stack.enter_context(clients.one())))
        assert len(made) == 25
        assert all(sum(client is each for _, client in lent) == 4 for each in made)
        source.shuffle(lent)
        while lent:
            stack, client = lent.pop()
            assert not client.is_closed
            stack.close()
            await asyncio.sleep(0)
        assert sum(not each.is_closed for each in made) == 1, "idle clients hold no connections"
        for _ in range(50):
            with clients.one() as client:
                assert client is made[0], "the first client has open connections"
        many = [clients.one() for _ in range(4)]
        for each in many:
            each.__enter__()
        for _ in range(50):
            with clients.one():
                pass
        assert len(made) == 26, "one request more or less does not create and close a client each time"
        for each in many:
            each.__exit__(None, None, None)
        await clients.aclose()
        assert all(each.is_closed for each in made)

    asyncio.run(spread())
