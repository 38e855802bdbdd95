"""The load of a real engine, read from its metrics."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from primeslurm.orchestrator.telemetry.engine_load import COUNTERS, GAUGES, LoadWindow, scrape
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from tests.engine.conftest import ConnectEngine
from tests.support.generate import generate
from tests.support.models import publish
from tests.support.processes import Server

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]

ONLY_IF_USED = {"external_queries", "external_hits", "drafted", "accepted"}


async def test_the_load_of_a_real_engine(engine: Server, client: ConnectEngine, model: Path, tmp_path: Path) -> None:
    await client(engine).apply(PolicyVersion(20, str(publish(model, tmp_path, 20))), timeout_s=600)
    window = LoadWindow()
    async with httpx.AsyncClient() as http:
        for now in (0.0, 10.0):
            samples, _ = await scrape(http, {"engine-r0-0": engine.url})
            assert set(samples["engine-r0-0"]) >= {*GAUGES, *COUNTERS} - ONLY_IF_USED
            window.add(now, samples)
            generate(engine.url, list(range(2, 42)) * 10, 5)
        window.add(20.0, (await scrape(http, {"engine-r0-0": engine.url})).samples)
    load = window.by_replica()["0"]["engine"]
    assert (load.generated_per_s, load.prompted_per_s) == (10 / 20, 800 / 20)
    # The second prompt differs from the first only in the last block, which is always computed.
    assert 0 < load.computed_per_s < load.prompted_per_s and load.prefix_hit_rate is not None
    assert 0.3 < load.prefix_hit_rate < 0.5
