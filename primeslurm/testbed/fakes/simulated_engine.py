"""An engine under a simulated clock: KV capacity, prefill and decode that saturate, a queue, preemption, prefix cache.

It reports what an engine's /metrics say. Sizes are those of a dense 8B model on one H100: a decode step reads 16 GB of
weights at 3.35 TB/s, and 131 kB of KV for each token held.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace

KV_TOKENS = 400_000
MAX_RUNNING = 256
PREFILL_TOKENS_PER_S = 20_000.0
STEP_S, STEP_S_PER_REQUEST, STEP_S_PER_TOKEN = 0.008, 0.0001, 4e-8
"""Of a decode step: fixed, for each request in it, and for each token of KV."""
STEP_PREFILL = 8192
"""Tokens of prompts in a step, at most: vLLM's `max_num_batched_tokens`. So long each decode step takes longer."""


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
    preempted: bool = False
    """It was, and has to be computed again, as far as its blocks were used by others."""
    transferred: bool = False
    """A prefill engine has computed its prompt."""

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
        self._sharing: Counter[str] = Counter()
        """Running requests by what they share: its KV is there once."""
        self._cached: OrderedDict[str, int] = OrderedDict()
        self._held = self._used = 0

    def add(self, turn: Turn) -> None:
        """Queue a request."""
        self._waiting.append(turn)

    def advance(self, seconds: float) -> list[Turn]:
        """Let time pass. Returns the requests that finished."""
        self._admit(seconds)
        left = seconds * self.speed
        prefilled_s = STEP_PREFILL / PREFILL_TOKENS_PER_S
        decoding = any(turn.prefill_left <= 0 for turn in self._running)
        left -= self._prefill(left * (prefilled_s / (prefilled_s + self._step_s()) if decoding else 1.0))
        return self._decode(left)

    def samples(self, replica: int) -> dict[str, dict[str, float]]:
        """Say the same by engine."""
        return {f"engine-r{replica}-0": self.sample()}

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
            if self._used + self._own(turn) + 16 > self._kv_tokens:
                break
            self._waiting.popleft()
            hit = turn.length if turn.transferred else min(self._hit(turn), turn.length - 1)
            turn.transferred = False
            turn.prefill_left = turn.length - hit
            budget -= turn.prefill_left
            if not turn.preempted:  # vLLM counts a prompt once, and not what is computed again for a preempted request
                self.counts["prefix_queries"] += turn.length
                self.counts["prefix_hits"] += hit
                self.counts["computed"] += turn.length - hit
            turn.preempted = False
            self._used += self._own(turn)
            self._sharing[turn.prefix] += 1
            self._running.append(turn)
        self._evict()

    def _own(self, turn: Turn) -> int:
        """Tokens that it needs room for: not those that running requests have."""
        return turn.length - (turn.shared if self._sharing[turn.prefix] else 0)

    def _hit(self, turn: Turn) -> int:
        """Tokens that are in the cache, and are not there for others to evict any more."""
        own, shared = (self._cached.pop(name, 0) for name in (turn.job, turn.prefix))
        self._held -= own + shared
        there = turn.shared if self._sharing[turn.prefix] else shared
        return there + own if there == turn.shared else there

    def _leave(self, turn: Turn) -> None:
        """Give back what it holds: it stays cached until others need the room, also of a request that is preempted."""
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
        """How long a decode step takes."""
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
        """Use blocks again: those that were given back first, and of a request its last ones first, as vLLM does."""
        while self._cached and (over := self._held + self._used - self._kv_tokens) > 0:
            name, tokens = next(iter(self._cached.items()))
            if tokens > over:
                self._cached[name] = tokens - over
            else:
                del self._cached[name]
            self._held -= min(tokens, over)


class PrefillDecode:
    """An engine that computes prompts, and one that samples: the first hands the KV over."""

    def __init__(self) -> None:
        self._prefill, self._decode = SimulatedEngine(), SimulatedEngine()
        self._turns: dict[str, Turn] = {}

    @property
    def counts(self) -> Counter[str]:
        """Return what was counted where tokens are sampled."""
        return self._decode.counts

    @property
    def speed(self) -> float:
        """Return the speed beside a replica that is well."""
        return self._decode.speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._prefill.speed = self._decode.speed = speed

    def add(self, turn: Turn) -> None:
        """Queue a request."""
        self._turns[turn.job] = turn
        self._prefill.add(replace(turn, target=1))

    def advance(self, seconds: float) -> list[Turn]:
        """Let time pass. Returns the requests that finished."""
        for computed in self._prefill.advance(seconds):
            turn = self._turns.pop(computed.job)
            turn.transferred = True
            self._decode.add(turn)
        return self._decode.advance(seconds)

    def samples(self, replica: int) -> dict[str, dict[str, float]]:
        """Say what the orchestrator reads of each engine's /metrics."""
        return {f"prefill-r{replica}-0": self._prefill.sample(), f"decode-r{replica}-0": self._decode.sample()}
