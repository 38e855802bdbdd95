"""Prefix cache of an emulated engine: hash chains of token blocks, as in vLLM, with least-recently-used eviction."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_TOKENS = 16


class PrefixCache:
    """Keeps at most `blocks` blocks, each identified by the hash of all tokens up to its end."""

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._cached: dict[int, None] = {}

    def hit(self, salt: str, tokens: Sequence[int]) -> int:
        """Return how many leading tokens are cached. The last token is never cached, because it must be computed."""
        cached = 0
        for key in _chain(salt, tokens):
            if key not in self._cached:
                break
            self._touch(key)
            cached += BLOCK_TOKENS
        return min(cached, max(len(tokens) - 1, 0))

    def hold(self, salt: str, tokens: Sequence[int]) -> None:
        """Cache the complete blocks of a sequence."""
        for key in _chain(salt, tokens):
            self._touch(key)
        while len(self._cached) > self._limit:
            del self._cached[next(iter(self._cached))]

    def clear(self) -> None:
        self._cached.clear()

    def _touch(self, key: int) -> None:
        self._cached.pop(key, None)
        self._cached[key] = None


def _chain(salt: str, tokens: Sequence[int]) -> list[int]:
    key, keys = hash(salt), []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, tuple(tokens[start : start + BLOCK_TOKENS])))
        keys.append(key)
    return keys
