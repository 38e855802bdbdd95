"""Shares of the service, over random loads."""

from __future__ import annotations

import random

import pytest

from primeslurm.tinker.fair_queue import FairQueue

Load = tuple[str, float]


def serve(queue: FairQueue[Load], together: int = 1) -> list[Load]:
    taken: list[Load] = []

    def accept(item: Load) -> float | None:
        if len(taken) == together:
            return None
        taken.append(item)
        return item[1]

    queue.take(accept)
    return taken


@pytest.mark.parametrize("seed", range(20))
def test_users_that_always_wait_get_shares_by_weight(seed: int) -> None:
    """However many clients a user has, and however its work is cut into requests."""
    rng = random.Random(seed)
    weights = {name: rng.choice([0.5, 1.0, 2.0, 4.0]) for name in "abc"}
    sizes = {name: rng.uniform(1.0, 100.0) for name in weights}
    clients = {name: rng.randint(1, 8) for name in weights}
    queue, received = FairQueue[Load](weights.__getitem__), dict.fromkeys(weights, 0.0)

    def add(user: str, client: int) -> None:
        queue.add(user, f"{user}:{client}", (user, rng.uniform(0.1, 1.0) * sizes[user]))

    for user, count in clients.items():
        for client in range(count):
            for _ in range(2000):
                add(user, client)
    for served in range(2000):
        for user, cost in serve(queue, together=rng.randint(1, 3) if seed % 2 else 1):
            received[user] += cost
        if seed % 2 == 0:  # the bound of start-time fair queueing holds at every time
            shares = {user: received[user] / weights[user] for user in weights}
            assert max(shares.values()) - min(shares.values()) <= 2 * max(sizes[u] / weights[u] for u in weights), (
                served
            )


@pytest.mark.parametrize("seed", range(20))
def test_one_request_of_an_idle_user_waits_for_one_request_of_each_other(seed: int) -> None:
    rng, queue = random.Random(seed), FairQueue[Load](lambda user: 1.0)
    for user in "abc":
        for client in range(rng.randint(1, 4)):
            for _ in range(500):
                queue.add(user, f"{user}:{client}", (user, rng.uniform(1.0, 9.0)))
    for _ in range(rng.randint(0, 200)):
        serve(queue)
    queue.add("late", "late:0", ("late", 1.0))
    order = [serve(queue)[0][0] for _ in range(4)]
    assert "late" in order, order


def test_idle_user_gets_no_credit() -> None:
    queue = FairQueue[Load](lambda user: 1.0)
    for _ in range(100):
        queue.add("busy", "busy:0", ("busy", 10.0))
    for _ in range(50):
        serve(queue)
    for _ in range(50):
        queue.add("idle", "idle:0", ("idle", 10.0))
    assert [serve(queue)[0][0] for _ in range(20)].count("busy") >= 9
