"""From the Prometheus text of engines to the load of roles and replicas."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import httpx
import pytest

from primeslurm.orchestrator.telemetry.engine_load import LoadWindow, Sample, parse, rounded, scrape

TEXT = """\
# HELP vllm:num_requests_running x
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0"} 2
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 0.5
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 1.5
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 70.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 30.0
vllm:prompt_tokens_total{engine="0"} 1e+02
vllm:prompt_tokens_created{engine="0"} 1.7e9
vllm:external_prefix_cache_hits_total{engine="0"} 4.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:num_requests_running_bucket{le="1"} 9
other 7
"""


def test_wanted_values_are_parsed_and_summed() -> None:
    assert parse(TEXT) == {
        "running": 4.0,
        "waiting": 2.0,
        "waiting_capacity": 0.5,
        "waiting_deferred": 1.5,
        "kv_usage": 0.25,
        "computed": 70.0,
        "prompted": 100.0,
        "external_hits": 4.0,
        "drafted": 30.0,
        "accepted": 20.0,
    }
    assert parse("") == {}


@pytest.fixture
def engine() -> Iterator[str]:
    """A server that answers with TEXT."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, *args: object) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_engine_without_an_answer_is_left_out(engine: str) -> None:
    async with httpx.AsyncClient() as client:
        engines = {"engine-r0-0": engine, "engine-r0-1": "http://127.0.0.1:9", "engine-r0-2": f"{engine}/no"}
        found = await scrape(client, engines)
    assert found == ({"engine-r0-0": parse(TEXT)}, frozenset())


def sample(**values: float) -> Sample:
    return values


def test_rates_and_means_are_over_the_window_by_role_and_replica() -> None:
    window = LoadWindow(window_s=20)
    for now in (0, 10, 20, 30):
        busy = sample(running=2, waiting=float(now == 30), kv_usage=0.5, generated=100.0 * now)
        idle = sample(running=0, kv_usage=0.1)
        window.add(now, {"decode-r0-0": busy, "decode-r1-0": idle, "prefill-r0-0": sample(computed=7.0 * now)})
    roles = window.by_role()
    assert (roles["decode"].engines, roles["decode"].running, roles["decode"].waiting) == (2, 2, 1)
    assert (roles["decode"].generated_per_s, roles["prefill"].computed_per_s) == (100.0, 7.0)
    assert roles["decode"].seconds == 20 and roles["decode"].busy_mean == 0.5
    assert (roles["decode"].kv_usage, roles["decode"].kv_usage_mean) == (0.5, pytest.approx(0.3))
    assert roles["decode"].waiting_mean == pytest.approx(1 / 3)
    replicas = window.by_replica()
    assert set(replicas) == {"0", "1"} and set(replicas["0"]) == {"decode", "prefill"}
    assert replicas["1"]["decode"].running == 0
    assert rounded(roles)["decode"].waiting_mean == 0.3333


def test_counters_continue_after_a_restart() -> None:
    window = LoadWindow()
    for now, generated in ((0, 500.0), (10, 600.0), (20, 50.0)):
        window.add(now, {"engine-r0-0": sample(generated=generated), "engine-r0-1": sample(running=1)})
    assert window.by_role()["engine"].generated_per_s == 7.5  # 100, then 50 since the restart
    window.add(30, {"engine-r0-0": sample(generated=50.0)})
    assert (window.by_role()["engine"].engines, window.by_role()["engine"].running) == (1, 0)


def test_hit_rates_are_over_the_window() -> None:
    window = LoadWindow()
    for now, hits in ((0, 1000.0), (10, 1030.0)):
        counters = sample(
            prefix_queries=2000.0 + 10 * now, prefix_hits=hits, drafted=40.0 + now, accepted=20 + 0.7 * now
        )
        window.add(now, {"engine-r0-0": counters})
    load = window.by_role()["engine"]
    assert load.prefix_hit_rate == 0.3 and load.external_hit_rate is None and load.acceptance_rate == 0.7
