"""Which blocks of KV an emulated engine still holds: hashed chains of tokens, as in vLLM, the oldest evicted first."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_TOKENS = 16


class PrefixCache:
    """Blocks by the hash of everything up to their end.

    Args:
        blocks: how many are held at most.
    """

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._held: dict[int, None] = {}

    def hit(self, salt: str, tokens: Sequence[int]) -> int:
        """Tell how many leading tokens are held, in whole blocks and never all of them: the last is always computed."""
        found = 0
        for key in _chain(salt, tokens):
            if key not in self._held:
                break
            self._touch(key)
            found += BLOCK_TOKENS
        return min(found, max(len(tokens) - 1, 0))

    def hold(self, salt: str, tokens: Sequence[int]) -> None:
        """Keep the whole blocks of a sequence."""
        for key in _chain(salt, tokens):
            self._touch(key)
        while len(self._held) > self._limit:
            del self._held[next(iter(self._held))]

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()

    def _touch(self, key: int) -> None:
        self._held.pop(key, None)
        self._held[key] = None


def _chain(salt: str, tokens: Sequence[int]) -> list[int]:
    key, keys = hash(salt), []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, tuple(tokens[start : start + BLOCK_TOKENS])))
        keys.append(key)
    return keys
