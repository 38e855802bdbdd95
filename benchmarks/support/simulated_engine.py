"""An engine with a simulated clock: KV capacity, prefill and decode limits, queue, preemption and prefix cache.

It reports the values of an engine's /metrics. Sizes are those of a dense 8B model on one H100: a decode step reads 16
GB of weights at 3.35 TB/s, and 131 kB of KV cache per token. Unlike `testbed.emulated.scheduler`, which serves real
requests in small, it predicts the throughput of a real engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace

KV_TOKENS = 400_000
MAX_RUNNING = 256
PREFILL_TOKENS_PER_S = 20_000.0
# Duration of a decode step [s]: fixed, per request in it, and per token of KV cache.
STEP_S, STEP_S_PER_REQUEST, STEP_S_PER_TOKEN = 0.008, 0.0001, 4e-8
# Most prompt tokens per step (vLLM's `max_num_batched_tokens`), which delay the decode steps.
STEP_PREFILL = 8192


@dataclass(eq=False, slots=True)
class Turn:
    """A request."""

    job: str
    prefix: str
    """Name of the prefix that it shares with other jobs. It also shares its own earlier turns."""
    shared: int
    """Length of the shared prefix [tokens]."""
    context: int
    """Length of the prompt [tokens]."""
    target: int
    """Number of tokens to sample."""
    sampled: float = 0.0
    prefill_left: float = 0.0
    preempted: bool = False
    """Whether it was preempted, so that evicted blocks must be computed again."""
    transferred: bool = False
    """Whether a prefill engine has computed its prompt."""

    @property
    def length(self) -> int:
        """Tokens in the KV cache."""
        return self.context + int(self.sampled)


class SimulatedEngine:
    """Schedules requests that are added with `add` as time advances. `speed` is relative to a healthy engine."""

    def __init__(self, kv_tokens: int = KV_TOKENS, speed: float = 1.0) -> None:
        self.speed = speed
        self.counts: Counter[str] = Counter()
        self._kv_tokens = kv_tokens
        self._running: list[Turn] = []
        self._waiting: deque[Turn] = deque()
        self._sharing: Counter[str] = Counter()
        """Running requests per shared prefix, whose KV blocks exist once."""
        self._cached: OrderedDict[str, int] = OrderedDict()
        self._held = self._used = 0

    def add(self, turn: Turn) -> None:
        self._waiting.append(turn)

    def advance(self, seconds: float) -> list[Turn]:
        """Advance by a time span, and return the requests that finished."""
        self._admit(seconds)
        left = seconds * self.speed
        prefilled_s = STEP_PREFILL / PREFILL_TOKENS_PER_S
        decoding = any(turn.prefill_left <= 0 for turn in self._running)
        left -= self._prefill(left * (prefilled_s / (prefilled_s + self._step_s()) if decoding else 1.0))
        return self._decode(left)

    def samples(self, replica: int) -> dict[str, dict[str, float]]:
        """Return `sample` by engine name."""
        return {f"engine-r{replica}-0": self.sample()}

    def sample(self) -> dict[str, float]:
        """Return the values that the orchestrator reads from /metrics."""
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

    def cached_tokens(self) -> dict[str, int]:
        """Return the computed tokens in the KV cache by job and prefix."""
        tokens = Counter(self._cached)
        for turn in self._running:
            computed = turn.length - int(turn.prefill_left)
            tokens[turn.prefix] = max(tokens[turn.prefix], min(computed, turn.shared))
            tokens[turn.job] = max(0, computed - turn.shared)
        return tokens

    def _admit(self, seconds: float) -> None:
        budget = seconds * PREFILL_TOKENS_PER_S - sum(turn.prefill_left for turn in self._running)
        while self._waiting and budget > 0 and len(self._running) < MAX_RUNNING:
            turn = self._waiting[0]
            if self._used + self._own(turn) + 16 > self._kv_tokens:
                break
            self._waiting.popleft()
            hit = turn.length if turn.transferred else min(self._hit(turn), turn.length - 1)
            turn.transferred = False
            turn.prefill_left = turn.length - hit
            budget -= turn.prefill_left
            if not turn.preempted:  # vLLM counts a prompt once, and not again after a preemption
                self.counts["prefix_queries"] += turn.length
                self.counts["prefix_hits"] += hit
                self.counts["computed"] += turn.length - hit
            turn.preempted = False
            self._used += self._own(turn)
            self._sharing[turn.prefix] += 1
            self._running.append(turn)
        self._evict()

    def _own(self, turn: Turn) -> int:
        """Return the tokens that need new room, without a prefix shared with running requests."""
        return turn.length - (turn.shared if self._sharing[turn.prefix] else 0)

    def _hit(self, turn: Turn) -> int:
        """Return the cached tokens, and reserve them so that they are not evicted."""
        private, shared = (self._cached.pop(name, 0) for name in (turn.job, turn.prefix))
        self._held -= private + shared
        prefix = turn.shared if self._sharing[turn.prefix] else shared
        return prefix + private if prefix == turn.shared else prefix

    def _leave(self, turn: Turn) -> None:
        """Release a request's tokens. They stay cached until others need the room."""
        self._sharing[turn.prefix] -= 1
        self._used -= self._own(turn)
        computed = turn.length - int(turn.prefill_left)
        self._keep(turn.job, max(0, computed - turn.shared))
        if not self._sharing[turn.prefix]:
            self._keep(turn.prefix, min(computed, turn.shared))

    def _keep(self, name: str, tokens: int) -> None:
        self._held += tokens - self._cached.pop(name, 0)
        self._cached[name] = tokens

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

    def _step_s(self) -> float:
        """Return the duration of a decode step [s]."""
        return STEP_S + STEP_S_PER_REQUEST * len(self._running) + STEP_S_PER_TOKEN * self._used

    def _decode(self, seconds: float) -> list[Turn]:
        decoding = [turn for turn in self._running if turn.prefill_left <= 0]
        if not decoding:
            return []
        steps = seconds / self._step_s()
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
            self._leave(turn)
            self.counts["prompted"] += turn.context
            self.counts["requests"] += 1
        if done:
            gone = set(map(id, done))
            self._running = [turn for turn in self._running if id(turn) not in gone]
        while self._used > self._kv_tokens:
            turn = self._running.pop()
            self._leave(turn)
            turn.preempted, turn.prefill_left = True, 0.0
            self._waiting.appendleft(turn)
            self.counts["preemptions"] += 1
        self._evict()
        return done

    def _evict(self) -> None:
        """Evict the blocks that were released first, and of a request its last ones first, as vLLM does."""
        while self._cached and (over := self._held + self._used - self._kv_tokens) > 0:
            name, tokens = next(iter(self._cached.items()))
            if tokens > over:
                self._cached[name] = tokens - over
            else:
                del self._cached[name]
            self._held -= min(tokens, over)


class PrefillDecode:
    """A prefill and a decode engine. The first transfers KV blocks to the second."""

    def __init__(self) -> None:
        self._prefill, self._decode = SimulatedEngine(), SimulatedEngine()
        self._turns: dict[str, Turn] = {}

    @property
    def counts(self) -> Counter[str]:
        """Counters of the decode engine."""
        return self._decode.counts

    @property
    def speed(self) -> float:
        return self._decode.speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._prefill.speed = self._decode.speed = speed

    def add(self, turn: Turn) -> None:
        self._turns[turn.job] = turn
        self._prefill.add(replace(turn, target=1))

    def advance(self, seconds: float) -> list[Turn]:
        """Advance by a time span, and return the requests that finished."""
        for computed in self._prefill.advance(seconds):
            turn = self._turns.pop(computed.job)
            turn.transferred = True
            self._decode.add(turn)
        return self._decode.advance(seconds)

    def samples(self, replica: int) -> dict[str, dict[str, float]]:
        """Return the values that the orchestrator reads from each engine's /metrics."""
        return {f"prefill-r{replica}-0": self._prefill.sample(), f"decode-r{replica}-0": self._decode.sample()}
