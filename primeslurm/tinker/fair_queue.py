"""Whose request is next: users share the service by cost, and a user's clients take turns. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items of users and their clients, as start-time fair queueing orders them.

    The next item is one of the waiting user that was charged the least, divided by the user's weight. A user that was
    idle gets no credit for that time: its account begins at that of the user who was served last. (Goyal et al., 1996)

    `weight` returns the weight of a user.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._waiting: dict[str, dict[str, deque[T]]] = {}
        """Items by user and client. The client whose turn is next comes first."""
        self._accounts: dict[str, float] = {}
        self._served = 0.0  # account of the user who was served last, before it was charged

    def add(self, user: str, client: str, item: T) -> None:
        """Add an item behind the other items of its client."""
        if user not in self._waiting:
            self._accounts[user] = max(self._accounts.get(user, 0.0), self._served)
        self._waiting.setdefault(user, {}).setdefault(client, deque()).append(item)

    def take(self, accept: Callable[[T], float | None]) -> None:
        """Offer the first item of each client, in the order of turns.

        `accept` returns the cost of an item that it takes, or None to leave it in the queue.
        """
        users = sorted(self._waiting, key=self._accounts.__getitem__)
        if users:
            self._served = max(self._served, self._accounts[users[0]])
        for user in users:
            for client, items in list(self._waiting[user].items()):
                if (cost := accept(items[0])) is not None:
                    self._accounts[user] += cost / self._weight(user)
                    self._remove_first(user, client)

    def _remove_first(self, user: str, client: str) -> None:
        clients = self._waiting[user]
        items = clients.pop(client)
        items.popleft()
        if items:
            clients[client] = items  # its next turn comes after those of the user's other clients
        if not clients:
            del self._waiting[user]
