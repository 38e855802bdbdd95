"""Metrics for Prometheus: what the head serves, to whom, and which addresses it publishes."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from primeslurm.base.files import write_atomic
from primeslurm.node.head import exporter
from primeslurm.node.head.exporter import (
    MAX_CONNECTIONS,
    TOKEN_FILE,
    Exporter,
    RunCollector,
    labelled,
    start_exporter,
    targets,
)
from primeslurm.plan.model import Plan
from primeslurm.records.fleet import FleetView
from primeslurm.records.metrics import Row, parse_row
from primeslurm.wire.transport import secret
from primeslurm.wire.transport.addresses import Addresses
from tests.support.plans import plan_of, process
from tests.support.waiting import wait_until

HOSTILE = 'a"b\\c\nd'


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    processes = (
        process("orchestrator", 0, role="orchestrator", ports={"wire": 1}),
        process("engine-r0-0", 0, replica=0, ports={"http": 1}),
        process("engine-r0-1", 0, replica=0, ports={"http": 1}),
        process("router-0", 0, role="router", replica=0, ports={"http": 1, "metrics": 2, "health": 3}),
    )
    (tmp_path / "run").mkdir()
    secret.create(tmp_path / "run")
    return plan_of(tmp_path / "run", processes)


@pytest.fixture
def collector(plan: Plan) -> RunCollector:
    view = FleetView(0.0, states={"engine-r0-0": "HEALTHY", "engine-r0-1": "HEALTHY", "router-0": "LOADING"})
    return RunCollector(plan, 3, lambda: view)


@pytest.fixture
def served(plan: Plan, collector: RunCollector) -> Iterator[Exporter]:
    server = start_exporter(plan, "127.0.0.1", collector)
    assert server is not None
    yield server
    server.close()


def write_rows(plan: Plan, *rows: dict[str, float], end: str = "") -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (Path(plan.run_dir) / "metrics.jsonl").write_text(text + end)


def get(address: str, path: str = "/metrics", token: str = "") -> str:
    request = urllib.request.Request(f"http://{address}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=600) as answer:
        text: str = answer.read().decode()
        return text


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the values by name and labels, without the label of the run."""
    return {
        (name, frozenset((key, value) for key, value in labels.items() if key != "run")): value
        for family in text_string_to_metric_families(text)
        for name, labels, value, *_ in family.samples
    }


def scraped(plan: Plan, served: Exporter) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return samples(get(served.address, token=(Path(plan.run_dir) / TOKEN_FILE).read_text()))


def only(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def test_scrape_needs_the_token_of_the_run(plan: Plan, served: Exporter) -> None:
    file = Path(plan.run_dir) / TOKEN_FILE
    token = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in (Path(plan.run_dir) / "secret").read_text(), "it admits to nothing else"
    assert "primeslurm_run_info" in get(served.address, token=token)
    for wrong in ("", "x", token[:-1]):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(served.address, token=wrong)
        assert refused.value.code == 401
    with pytest.raises(urllib.error.HTTPError) as missing:
        get(served.address, "/secret", token)
    assert missing.value.code == 404


def test_open_metrics_need_no_token_and_off_serves_none(plan: Plan, collector: RunCollector) -> None:
    server = start_exporter(plan.model_copy(update={"prometheus": "open"}), "127.0.0.1", collector)
    assert server is not None and not (Path(plan.run_dir) / TOKEN_FILE).exists()
    assert "primeslurm_attempt" in get(server.address)
    server.close()
    assert start_exporter(plan.model_copy(update={"prometheus": "off"}), "127.0.0.1", collector) is None
    assert start_exporter(plan, "", collector) is None, "the node has no address"


def test_head_runs_without_an_exporter_if_it_cannot_serve(
    plan: Plan, collector: RunCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("address in use")

    monkeypatch.setattr(exporter, "_Server", refuse)
    assert start_exporter(plan, "127.0.0.1", collector) is None


def test_newest_row_is_exposed_with_labels(plan: Plan, served: Exporter) -> None:
    assert scraped(plan, served)["primeslurm_processes", only(role="engine", state="HEALTHY")] == 2
    write_rows(
        plan,
        {"step": 1, "time": 9.0, "reward/mean": 0.1, "trainer/mfu": 0.2, "trainer/tokens": 10.0, "old/reward": 1.0},
        {"step": 0, "time": 9.5, "eval/math/pass@1": 0.5, "eval/seconds": 4.0},
        {
            **{"step": 2, "time": 10.0, "reward/mean": 0.3, "trainer/tokens": 30.0, "trainer/gpu_hours": 2.0},
            **{"engines/decode/kv_usage_mean": 0.7, "engines/decode/gpu_hours": 8.0, f"{HOSTILE}/reward": 1.5},
            **{"env/math/solve_rate": 0.25, "groups/rejected_zero": 3.0, "trainer/seconds/wait": float("nan")},
        },
        end='{"step": 3, "rew',
    )
    values = scraped(plan, served)
    assert values["primeslurm_step", only()] == 2 and values["primeslurm_step_timestamp_seconds", only()] == 10
    assert values["primeslurm_reward_mean", only()] == 0.3
    assert values["primeslurm_engines_kv_usage_mean", only(role="decode")] == 0.7
    assert values["primeslurm_environment", only(environment=HOSTILE, metric="reward")] == 1.5
    assert values["primeslurm_env", only(environment="math", metric="solve_rate")] == 0.25
    assert values["primeslurm_eval", only(environment="math", metric="pass@1")] == 0.5
    assert values["primeslurm_eval_seconds", only()] == 4
    assert values["primeslurm_groups_rejected_zero", only()] == 3
    assert values["primeslurm_trained_tokens_total", only()] == 40
    assert values["primeslurm_gpu_hours_total", only(role="decode")] == 8
    assert ("primeslurm_trainer_mfu", only()) not in values, "the newest row has none"


def test_each_row_counts_once_and_a_resumed_run_counts_again(plan: Plan, served: Exporter) -> None:

    def tokens() -> float:
        return scraped(plan, served)["primeslurm_trained_tokens_total", only()]

    rows = [{"step": step, "trainer/tokens": 1.0} for step in range(1, 5)]
    write_rows(plan, *rows[:2])
    assert [tokens(), tokens()] == [2, 2]
    write_rows(plan, *rows, end='{"step": 5, "trainer/to')
    assert tokens() == 4
    write_rows(plan, *rows, {"step": 5, "trainer/tokens": 1.0})
    assert tokens() == 5
    write_rows(plan, rows[0])
    assert tokens() == 1


def test_rows_count_once_if_several_servers_scrape_at_once(
    plan: Plan, collector: RunCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(plan, *({"step": step, "trainer/tokens": 1.0} for step in range(1, 5)))
    scrapes = ThreadPoolExecutor(2)
    others: list[Future[Any]] = []

    def parse(line: bytes) -> Row | None:
        if not others:  # another scrape begins while this one reads
            others.append(scrapes.submit(lambda: list(collector.collect())))
            with contextlib.suppress(TimeoutError):
                others[0].result(0.2)
        return parse_row(line)

    monkeypatch.setattr(exporter, "parse_row", parse)
    for families in (list(collector.collect()), others[0].result(60)):
        tokens = [family for family in families if family.name == "primeslurm_trained_tokens"]
        assert [sample.value for sample in tokens[0].samples] == [4.0]
    scrapes.shutdown()


def test_a_file_that_was_replaced_by_a_longer_one_counts_again(plan: Plan, collector: RunCollector) -> None:
    path = Path(plan.run_dir) / "metrics.jsonl"
    for tokens in (1, 100_000):
        rows = ({"step": step, "trainer/tokens": tokens} for step in range(1, 5))
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
        values = {sample.name: sample.value for family in collector.collect() for sample in family.samples}
        assert values["primeslurm_trained_tokens_total"] == 4 * tokens


def test_no_name_or_number_of_a_row_ends_the_scrapes(plan: Plan, served: Exporter) -> None:
    huge = '{"step": 1, "time": 2.0, "\\udfff/reward": 0.5, "reward/mean": 0.25, "trainer/loss": 1' + "0" * 400 + "}\n"
    (Path(plan.run_dir) / "metrics.jsonl").write_text(huge)
    values = scraped(plan, served)
    assert values["primeslurm_environment", only(environment="?", metric="reward")] == 0.5
    assert values["primeslurm_reward_mean", only()] == 0.25 and ("primeslurm_trainer_loss", only()) not in values


def test_rows_of_sft_have_the_names_of_rl(plan: Plan, served: Exporter) -> None:
    write_rows(plan, {"step": 1, "loss": 0.5, "mfu": 0.3, "gpu_hours": 0.25})
    values = scraped(plan, served)
    assert values["primeslurm_trainer_mfu", only()] == 0.3
    assert values["primeslurm_gpu_hours_total", only(role="trainer")] == 0.25


def test_targets_are_the_head_and_everything_that_serves_metrics(plan: Plan) -> None:
    names = ("orchestrator", "engine-r0-0", "engine-r0-1", "router-0")
    ports = {"orchestrator": {"wire": 1}, "engine-r0-0": {"http": 8000}, "engine-r0-1": {"http": 8001}}
    addresses = Addresses(
        dict.fromkeys(names, "10.0.0.2"), {**ports, "router-0": {"http": 7000, "metrics": 7001}}, ["engine-r0-1"]
    )
    found = targets(plan, addresses, "10.0.0.1:9")
    assert [target["targets"] for target in found] == [["10.0.0.1:9"], ["10.0.0.2:8000"], ["10.0.0.2:7001"]]
    labels = [target["labels"] for target in found]
    assert labels[1] == {"run": plan.run, "role": "engine", "process": "engine-r0-0", "replica": "0"}
    assert labels[0]["role"] == "head"
    assert targets(plan, Addresses({}, {}), None) == []


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("throughput/tokens_per_s", "primeslurm_throughput_tokens_per_s"),
        ("trainer/seconds/forward_backward", "primeslurm_trainer_seconds_forward_backward"),
        ("memory/baseline.x/y", "primeslurm_memory"),
        ("engines/prefill/busy_mean", "primeslurm_engines_busy_mean"),
        ("words/solver/reward", "primeslurm_environment"),
        ("trainer/a-b c", "primeslurm_trainer_a_b_c"),
        ("alone", "primeslurm_environment"),
    ],
)
def test_names_are_valid_for_prometheus(name: str, family: str) -> None:
    assert labelled(name)[0] == family


def test_idle_connections_are_bounded(served: Exporter) -> None:
    host, port = served.address.split(":")
    with contextlib.ExitStack() as idle:
        for _ in range(MAX_CONNECTIONS):
            idle.enter_context(socket.create_connection((host, int(port)), timeout=600))
        with socket.create_connection((host, int(port)), timeout=600) as refused:
            assert refused.recv(1) == b""
    wait_until(lambda: answers(served.address))


def answers(address: str) -> bool:
    try:
        get(address)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return True
