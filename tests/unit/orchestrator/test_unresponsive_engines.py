"""An engine that accepts connections and does not answer is busy, and keeps its slots for a while."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path

import httpx

from primeslurm.orchestrator.dispatch.concurrency import Concurrency
from primeslurm.orchestrator.telemetry.engine_load import COUNTERS, GAUGES, Sample, scrape
from primeslurm.orchestrator.telemetry.progress_monitor import ProgressMonitor
from primeslurm.orchestrator.weight_transfer.polling import UNRESPONSIVE_S
from primeslurm.recipe import Recipe
from primeslurm.records.journal import Journal
from tests.support.recipes import recipe_data

ROUTERS = {"router-0": 40, "router-1": 40}
NAMES = ("engine-r0-0", "engine-r0-1", "engine-r1-0")


async def test_unresponsive_engine_is_distinguished_from_a_missing_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        async with httpx.AsyncClient(trust_env=False) as client:
            found = await scrape(client, {"engine-r0-0": url, "engine-r0-1": "http://127.0.0.1:9"}, timeout_s=0.5)
    assert found == ({}, {"engine-r0-0"})


class Looks:
    """The watch's looks at two replicas, and the shares that follow."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.concurrency = Concurrency(ROUTERS, NAMES, 1000, clock=lambda: self.now)
        recipe = Recipe.model_validate(recipe_data())
        self.watch = ProgressMonitor(
            recipe,
            Journal(directory, "orchestrator"),
            dict,
            lambda: self.now,
            looked=lambda samples: self.concurrency.observe(samples, ROUTERS, {}),
        )
        self.samples: dict[str, Sample] = {name: dict.fromkeys((*GAUGES, *COUNTERS), 0.0) for name in NAMES}

    def look(self, silent: Collection[str] = (), gone: Collection[str] = ()) -> dict[str, int]:
        self.now += 5
        for sample in self.samples.values():
            sample |= {"running": 20.0, "kv_usage": 0.5, "generated": sample["generated"] + 1000}
        answer = {name: dict(one) for name, one in self.samples.items() if name not in (*silent, *gone)}
        self.watch.engines_seen(answer, silent)
        return self.concurrency.slots


def test_slots_stay_during_a_short_gap_and_end_after_a_long_one(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    for _ in range(6):
        before = looks.look()
    assert min(before.values()) > 0
    for _ in range(int(UNRESPONSIVE_S / 5)):
        after = looks.look(silent=NAMES)
        assert all(after[router] >= before[router] for router in ROUTERS), "all engines are busy at once"
    assert set(looks.look(silent=NAMES).values()) == {0}
    assert min(looks.look().values()) > 0, "they answer again"


def test_unresponsive_engine_keeps_its_slots_and_missing_engine_loses_them(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    for _ in range(6):
        before = looks.look()
    assert looks.look(silent=["engine-r0-0"])["router-0"] >= before["router-0"]
    assert looks.look(gone=["engine-r0-0"])["router-0"] <= 0.75 * looks.concurrency.slots["router-1"] * 2
    gone = looks.look(gone=["engine-r0-0", "engine-r0-1"])
    assert gone["router-0"] == 0 and gone["router-1"] > 0
    assert looks.look(silent=["engine-r0-0", "engine-r0-1"])["router-0"] == 0, "what it said before is no more"


def test_unresponsive_engines_are_not_counted_in_the_load(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    for _ in range(3):
        looks.look()
    tokens = looks.watch._window.tokens
    looks.look(silent=NAMES)
    assert looks.watch._window.tokens == tokens and not looks.watch._roles, "status shows who answers"
