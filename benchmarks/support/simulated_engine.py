"""An engine under a simulated clock: KV capacity, prefill and decode that saturate, a queue, preemption, prefix cache.

It reports what an engine's /metrics say. Sizes are those of a dense 8B model on one H100: a decode step reads 16 GB of
weights at 3.35 TB/s, and 131 kB of KV for each token held.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

KV_TOKENS = 400_000
MAX_RUNNING = 256
PREFILL_TOKENS_PER_S = 20_000.0
STEP_S, STEP_S_PER_REQUEST, STEP_S_PER_TOKEN = 0.008, 0.0001, 4e-8
"""Of a decode step: fixed, for each request in it, and for each token of KV."""
MOST_PREFILL = 0.8
"""Share of the time that prefill takes at most while others decode."""


@dataclass(eq=False, slots=True)
class Turn:
    """A request."""

    job: str
    prefix: str
    """What it shares its first tokens with, besides its own turns before."""
    shared: int
    """How many these are."""
    context: int
    """Tokens of the prompt."""
    target: int
    """Tokens to be sampled."""
    sampled: float = 0.0
    prefill_left: float = 0.0

    @property
    def length(self) -> int:
        """Tokens whose KV it holds."""
        return self.context + int(self.sampled)


class SimulatedEngine:
    """Requests come in with `add`, time passes with `advance`.

    Args:
        kv_tokens: capacity of the KV cache.
        speed: beside an engine that is well.
    """

    def __init__(self, kv_tokens: int = KV_TOKENS, speed: float = 1.0) -> None:
        self.speed = speed
        self.counts: Counter[str] = Counter()
        self._kv_tokens = kv_tokens
        self._running: list[Turn] = []
        self._waiting: deque[Turn] = deque()
        self._cached: OrderedDict[str, int] = OrderedDict()
        self._used = 0

    def add(self, turn: Turn) -> None:
        """Queue a request."""
        self._waiting.append(turn)

    def advance(self, seconds: float) -> list[Turn]:
        """Let time pass. Returns the requests that finished."""
        self._admit(seconds)
        left = seconds * self.speed
        left -= self._prefill(left * (MOST_PREFILL if len(self._running) > 1 else 1.0))
        return self._decode(left)

    def sample(self) -> dict[str, float]:
        """Say what the orchestrator reads of an engine's /metrics."""
        gauges = {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "waiting_capacity": len(self._waiting),
            "waiting_deferred": 0,
            "kv_usage": min(1.0, self._used / self._kv_tokens),
        }
        return {
            **{name: float(value) for name, value in gauges.items()},
            **{k: float(v) for k, v in self.counts.items()},
        }

    def _admit(self, seconds: float) -> None:
        budget = seconds * PREFILL_TOKENS_PER_S - sum(turn.prefill_left for turn in self._running)
        while self._waiting and budget > 0 and len(self._running) < MAX_RUNNING:
            turn = self._waiting[0]
            if self._used + turn.length + 16 > self._kv_tokens:
                break
            self._waiting.popleft()
            hit = min(max(self._cached.pop(turn.job, 0), self._shared(turn)), turn.length - 1)
            turn.prefill_left = turn.length - hit
            budget -= turn.prefill_left
            self.counts["prefix_queries"] += turn.length
            self.counts["prefix_hits"] += hit
            self.counts["computed"] += turn.length - hit
            self._used += turn.length
            self._running.append(turn)
        self._evict()

    def _shared(self, turn: Turn) -> int:
        if turn.prefix in self._cached:
            self._cached.move_to_end(turn.prefix)
        return self._cached.get(turn.prefix, 0)

    def _prefill(self, seconds: float) -> float:
        tokens = budget = seconds * PREFILL_TOKENS_PER_S
        for turn in self._running:
            if turn.prefill_left > 0:
                done = min(tokens, turn.prefill_left)
                turn.prefill_left -= done
                tokens -= done
                if tokens <= 0:
                    break
        return (budget - tokens) / PREFILL_TOKENS_PER_S

    def _decode(self, seconds: float) -> list[Turn]:
        decoding = [turn for turn in self._running if turn.prefill_left <= 0]
        if not decoding:
            return []
        steps = seconds / (STEP_S + STEP_S_PER_REQUEST * len(decoding) + STEP_S_PER_TOKEN * self._used)
        done = []
        for turn in decoding:
            before = int(turn.sampled)
            turn.sampled = min(turn.sampled + steps, turn.target)
            grown = int(turn.sampled) - before
            self._used += grown
            self.counts["generated"] += grown
            if turn.sampled >= turn.target:
                done.append(turn)
        for turn in done:
            self._used -= turn.length
            self._cached[turn.job] = turn.length
            self._cached.setdefault(turn.prefix, turn.shared)
            self.counts["prompted"] += turn.context
            self.counts["requests"] += 1
        if done:
            gone = set(map(id, done))
            self._running = [turn for turn in self._running if id(turn) not in gone]
        while self._used > self._kv_tokens:
            turn = self._running.pop()
            self._used -= turn.length
            self._waiting.appendleft(turn)
            self.counts["preemptions"] += 1
        self._evict()
        return done

    def _evict(self) -> None:
        held = sum(self._cached.values())
        while self._cached and held + self._used > self._kv_tokens:
            held -= self._cached.popitem(last=False)[1]
