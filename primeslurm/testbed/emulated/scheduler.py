"""Scheduler of an emulated engine: queue, KV blocks, prefill, decode and preemption, advanced by the caller's clock.

Prefill serves requests in order of arrival, and admits only those that it can start in the same turn. Decode runs for
all requests at once, and slows down with load.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16
PREFILL_TOKENS_PER_S = 8000.0
# Speed of a request that runs alone.
DECODE_TOKENS_PER_S = 40.0
# Relative slowdown of each decode step per further request in the batch.
SLOWDOWN_PER_REQUEST = 0.02
# Speed at which the KV blocks of a prompt come from a prefill engine.
TRANSFER_TOKENS_PER_S = 200_000.0


@dataclass(eq=False)
class Request:
    """A request and its progress."""

    prompt: Sequence[int]
    salt: str
    target: int
    """Number of tokens to sample."""
    remote: bool = False
    """Whether a prefill engine computed the prompt, so that its KV blocks are transferred."""
    sampled: int = 0
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(policy version, start, end) over the sampled tokens."""
    prefill_left: float = 0.0
    """Remaining time of prefill or transfer [s]."""
    progress: float = 0.0
    """Fraction of the next token."""

    @property
    def length(self) -> int:
        return len(self.prompt) + self.sampled

    @property
    def blocks(self) -> int:
        """KV blocks of all tokens and the next one."""
        return self.length // BLOCK_TOKENS + 1


class Scheduler:
    """Schedules requests over `blocks` KV blocks. At most `max_running` requests run at a time."""

    def __init__(self, blocks: int, max_running: int, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S) -> None:
        self.blocks = blocks
        self.version = "default"
        """Current policy version."""
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.held = 0
        """Requests that did not fit in the last turn, without those that arrived after it."""
        self.counts: Counter[str] = Counter()
        self._max_running = max_running
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._cache = PrefixCache(blocks)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def used_blocks(self) -> int:
        return sum(request.blocks for request in self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def clear_cache(self) -> None:
        self._cache.clear()

    def advance(self, seconds: float) -> list[Request]:
        """Advance by a time span, and return the requests that finished."""
        self._admit(seconds)
        self._prefill(seconds)
        self._decode(seconds)
        done = [request for request in self.running if request.sampled >= request.target]
        self.running = [request for request in self.running if request.sampled < request.target]
        self.held = len(self.waiting)
        return done

    def finished(self, request: Request, tokens: Sequence[int]) -> None:
        """Put the tokens of a finished request into the prefix cache."""
        self._cache.hold(request.salt, [*request.prompt, *tokens])

    def _admit(self, seconds: float) -> None:
        seconds -= sum(request.prefill_left for request in self.running)
        while self.waiting and seconds > 0 and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            request.prefill_left = self._prefill_seconds(request)
            seconds -= request.prefill_left
            self.running.append(request)

    def _fits(self, request: Request) -> bool:
        return len(self.running) < self._max_running and self.used_blocks + request.blocks <= self.blocks

    def _prefill_seconds(self, request: Request) -> float:
        hit = self._cache.hit(request.salt, request.prompt)
        missing = request.length - hit
        self.counts["prefix_queries"] += request.length
        self.counts["prefix_hits"] += hit
        self.counts["prompt_tokens"] += len(request.prompt)
        if request.remote and not request.sampled:
            self.counts["external_queries"] += missing
            self.counts["external_hits"] += missing
            return missing / TRANSFER_TOKENS_PER_S
        self.counts["computed_tokens"] += missing
        return missing / self._prefill_tokens_per_s

    def _prefill(self, seconds: float) -> None:
        for request in self.running:
            spent = min(seconds, request.prefill_left)
            request.prefill_left -= spent
            seconds -= spent
            if request.prefill_left == 0 and not request.sampled:
                self._sample(request, 1)  # a prefill ends with the first token

    def _decode(self, seconds: float) -> None:
        rate = DECODE_TOKENS_PER_S / (1 + SLOWDOWN_PER_REQUEST * len(self.running))
        for request in list(self.running):
            if request not in self.running or request.prefill_left > 0:
                continue
            request.progress += seconds * rate
            whole = min(int(request.progress), request.target - request.sampled)
            request.progress -= int(request.progress)
            if whole:
                self._sample(request, whole)
                self._make_room(request)

    def _sample(self, request: Request, count: int) -> None:
        start, end = request.sampled, request.sampled + count
        if request.spans and request.spans[-1][0] == self.version:
            start = request.spans.pop()[1]
        request.spans.append((self.version, start, end))
        request.sampled = end
        self.counts["generation_tokens"] += count

    def _make_room(self, request: Request) -> None:
        """Preempt the newest requests while the grown sequences do not fit into the KV blocks."""
        while self.used_blocks > self.blocks and self.running[-1] is not request:
            self.waiting.appendleft(self.running.pop())
            self.counts["preemptions"] += 1


def exposition(scheduler: Scheduler) -> str:
    """Return the scheduler's state in vLLM's Prometheus format."""
    counts = scheduler.counts
    by_source = "prompt_tokens_by_source_total"
    values: dict[str, float] = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": scheduler.held,
        "num_requests_waiting_by_reason|reason=capacity": scheduler.held,
        "kv_cache_usage_perc": scheduler.used_blocks / scheduler.blocks,
        "prompt_tokens_total": counts["prompt_tokens"],
        "generation_tokens_total": counts["generation_tokens"],
        "num_preemptions_total": counts["preemptions"],
        "prefix_cache_queries_total": counts["prefix_queries"],
        "prefix_cache_hits_total": counts["prefix_hits"],
        "external_prefix_cache_queries_total": counts["external_queries"],
        "external_prefix_cache_hits_total": counts["external_hits"],
        f"{by_source}|source=local_compute": counts["computed_tokens"],
        f"{by_source}|source=local_cache_hit": counts["prefix_hits"],
        f"{by_source}|source=external_kv_transfer": counts["external_hits"],
        "request_success_total|finished_reason=stop": counts["success_stop"],
        "request_success_total|finished_reason=length": counts["success_length"],
    }
    return "".join(f"{_series(name)} {value}\n" for name, value in values.items())


def _series(name: str) -> str:
    metric, _, label = name.partition("|")
    key, _, value = label.partition("=")
    extra = f',{key}="{value}"' if label else ""
    return f'vllm:{metric}{{engine="0",model_name="policy"{extra}}}'


class PrefixCache:
    """Hash chains of token blocks, as in vLLM. At most `blocks` are kept; the least recently used are evicted first."""

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
