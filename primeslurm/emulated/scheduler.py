"""What an emulated engine's batch does over time: queue, KV blocks, prefill, decode, preemption. Pure, clock injected.

Prefill serves requests in order of arrival, and lets in no more than it can begin with in a turn; decode runs for all
at once and slows down with load.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from primeslurm.emulated.prefix_cache import BLOCK_TOKENS, PrefixCache

PREFILL_TOKENS_PER_S = 8000.0
DECODE_TOKENS_PER_S = 40.0
"""Of one request that runs alone."""
SLOWDOWN_PER_REQUEST = 0.02
"""Each further request in the batch makes every decode step this much slower."""
TRANSFER_TOKENS_PER_S = 200_000.0
"""KV of a prompt that another engine prefilled."""


@dataclass(eq=False)
class Request:
    """One request on its way through the engine."""

    prompt: Sequence[int]
    salt: str
    target: int
    """Tokens to be sampled."""
    remote: bool = False
    """Its prompt was prefilled by another engine: the KV is fetched, not computed."""
    sampled: int = 0
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(policy version, start, end) over the sampled tokens."""
    prefill_left: float = 0.0
    """Seconds of prefill, or of transfer, that are still to be done."""
    progress: float = 0.0
    """Fraction of the next token."""

    @property
    def length(self) -> int:
        """Tokens whose KV is held."""
        return len(self.prompt) + self.sampled

    @property
    def blocks(self) -> int:
        """KV blocks for these tokens and the next one."""
        return self.length // BLOCK_TOKENS + 1


class Scheduler:
    """Requests come in with `add`, time passes with `advance`.

    Args:
        blocks: KV blocks of the engine.
        max_running: requests that run at once; more wait.
        prefill_tokens_per_s: how fast prompts are computed.
    """

    def __init__(self, blocks: int, max_running: int, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S) -> None:
        self.blocks = blocks
        self.version = "default"
        """Policy version that samples now."""
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.held = 0
        """Requests that there was no room for in the last turn. Others only wait for the next turn to begin."""
        self.counts: Counter[str] = Counter()
        self._max_running = max_running
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._cache = PrefixCache(blocks)

    @property
    def busy(self) -> bool:
        """Whether time changes anything."""
        return bool(self.running or self.waiting)

    @property
    def used_blocks(self) -> int:
        """KV blocks of running requests."""
        return sum(sequence.blocks for sequence in self.running)

    def add(self, sequence: Request) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def abort(self, sequence: Request) -> None:
        """Drop a request wherever it is; unknown ones are ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def clear_cache(self) -> None:
        """Forget all prefixes."""
        self._cache.clear()

    def advance(self, seconds: float) -> list[Request]:
        """Let time pass. Returns the requests that finished."""
        self._admit(seconds)
        self._prefill(seconds)
        self._decode(seconds)
        done = [sequence for sequence in self.running if sequence.sampled >= sequence.target]
        self.running = [sequence for sequence in self.running if sequence.sampled < sequence.target]
        self.held = len(self.waiting)
        return done

    def finished(self, sequence: Request, tokens: Sequence[int]) -> None:
        """Tell which tokens were sampled, for the prefix cache."""
        self._cache.hold(sequence.salt, [*sequence.prompt, *tokens])

    def _admit(self, seconds: float) -> None:
        seconds -= sum(sequence.prefill_left for sequence in self.running)
        while self.waiting and seconds > 0 and self._fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.prefill_left = self._prefill_seconds(sequence)
            seconds -= sequence.prefill_left
            self.running.append(sequence)

    def _fits(self, sequence: Request) -> bool:
        return len(self.running) < self._max_running and self.used_blocks + sequence.blocks <= self.blocks

    def _prefill_seconds(self, sequence: Request) -> float:
        hit = self._cache.hit(sequence.salt, sequence.prompt)
        missing = sequence.length - hit
        self.counts["prefix_queries"] += sequence.length
        self.counts["prefix_hits"] += hit
        self.counts["prompt_tokens"] += len(sequence.prompt)
        if sequence.remote and not sequence.sampled:
            self.counts["external_queries"] += missing
            self.counts["external_hits"] += missing
            return missing / TRANSFER_TOKENS_PER_S
        self.counts["computed_tokens"] += missing
        return missing / self._prefill_tokens_per_s

    def _prefill(self, seconds: float) -> None:
        for sequence in self.running:
            spent = min(seconds, sequence.prefill_left)
            sequence.prefill_left -= spent
            seconds -= spent
            if sequence.prefill_left == 0 and not sequence.sampled:
                self._sample(sequence, 1)  # a prefill ends with the first token

    def _decode(self, seconds: float) -> None:
        rate = DECODE_TOKENS_PER_S / (1 + SLOWDOWN_PER_REQUEST * len(self.running))
        for sequence in list(self.running):
            if sequence not in self.running or sequence.prefill_left > 0:
                continue
            sequence.progress += seconds * rate
            whole = min(int(sequence.progress), sequence.target - sequence.sampled)
            sequence.progress -= int(sequence.progress)
            if whole:
                self._sample(sequence, whole)
                self._make_room(sequence)

    def _sample(self, sequence: Request, count: int) -> None:
        start, end = sequence.sampled, sequence.sampled + count
        if sequence.spans and sequence.spans[-1][0] == self.version:
            start = sequence.spans.pop()[1]
        sequence.spans.append((self.version, start, end))
        sequence.sampled = end
        self.counts["generation_tokens"] += count

    def _make_room(self, sequence: Request) -> None:
        """A sequence grew: while KV is short, the newest request goes back to the queue and is prefilled again."""
        while self.used_blocks > self.blocks and self.running[-1] is not sequence:
            self.waiting.appendleft(self.running.pop())
            self.counts["preemptions"] += 1
