"""Advice on prefill and decode engines, from the metrics of emulated engines under a minute of simulated load."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from primeslurm.orchestrator.telemetry.engine_load import LoadWindow, parse, rounded
from primeslurm.run.status.advice import Advice, Tunables, advise
from primeslurm.testbed.emulated.scheduler import Request, Scheduler, exposition

TICK_S = 0.1
LOOK_S = 5.0
SECONDS = 60.0


@dataclass
class Loop:
    """A prefill engine, three decode engines, and requests that restart as soon as they end."""

    blocks: int
    prefill_tokens_per_s: float
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.prefill = Scheduler(2048, 64, self.prefill_tokens_per_s)
        self.decode = [Scheduler(self.blocks, 64) for _ in range(3)]

    def begin(self) -> None:
        prompt = [self.random.randrange(1000) for _ in range(60)]
        self.prefill.add(Request(prompt, "", 1))

    def tick(self) -> None:
        for request in self.prefill.advance(TICK_S):
            self.random.choice(self.decode).add(Request(request.prompt, "", 40, remote=True))
        for engine in self.decode:
            for _ in engine.advance(TICK_S):
                self.begin()

    def advice(self, rollouts: int) -> list[Advice]:
        window = LoadWindow()
        for _ in range(rollouts):
            self.begin()
        for tick in range(round(SECONDS / TICK_S)):
            self.tick()
            if tick % round(LOOK_S / TICK_S) == 0:
                engines = {"prefill-r0-0": self.prefill} | {f"decode-r0-{i}": e for i, e in enumerate(self.decode)}
                window.add(tick * TICK_S, {name: parse(exposition(engine)) for name, engine in engines.items()})
        return advise(rounded(window.by_role()), Tunables(prefill=1, decode=3))


@pytest.mark.parametrize(
    ("blocks", "prefill_tokens_per_s", "rollouts", "text", "changes"),
    [
        (2048, 250.0, 32, "prefill is saturated: 2:3", {"deployment.inference.prefill.num_replicas": 2}),
        (24, 8000.0, 48, "decode is saturated: 1:6", {"deployment.inference.decode.num_replicas": 6}),
        (2048, 8000.0, 48, None, {}),
    ],
    ids=["prefill-bound", "decode-bound", "balanced"],
)
def test_metrics_show_what_limits_an_engine(
    blocks: int, prefill_tokens_per_s: float, rollouts: int, text: str | None, changes: dict[str, int]
) -> None:
    advices = [advice for advice in Loop(blocks, prefill_tokens_per_s).advice(rollouts) if ":" in advice.text]
    assert [advice.text.partition(" (")[0] for advice in advices] == ([] if text is None else [text])
    assert all(advice.changes == changes for advice in advices)
