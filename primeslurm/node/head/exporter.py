"""Prometheus on the head: `/metrics` of the run, and the addresses that a Prometheus server can scrape."""

from __future__ import annotations

import hmac
import logging
import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from primeslurm.base import files
from primeslurm.plan.model import VLLM_ROLES, Plan
from primeslurm.records.fleet import FleetView
from primeslurm.records.metrics import FILE, Row, is_evaluation, parse_row, with_rl_names
from primeslurm.records.reading import GrowingFile
from primeslurm.wire.transport import secret
from primeslurm.wire.transport.addresses import Addresses

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

log = logging.getLogger(__name__)
# In the run directory: targets in the format of Prometheus' file_sd, and the token of `/metrics`.
TARGETS_FILE, TOKEN_FILE = "prometheus.json", "prometheus.token"
# Name of the port with a process's metrics, by role. Others serve none, or only what the head exposes.
_PORTS = {**dict.fromkeys(VLLM_ROLES, "http"), "router": "metrics"}
_REQUEST_S = 10.0
# Connections served at a time, with a thread each. Further ones are closed, so that no program can exhaust the head.
MAX_CONNECTIONS = 16
Target = dict[str, Any]


class Exporter:
    """Serves `/metrics` at a free port, in threads of its own. An empty token admits every scrape."""

    def __init__(self, host: str, collector: Any, token: str) -> None:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        handler = type("Handler", (_Handler,), {"registry": registry, "token": token})
        self._server = _Server((host, 0), handler)
        threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True).start()
        self.address = f"{host}:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_bind(self) -> None:
        # HTTPServer looks up the name of the host, which takes seconds where DNS does not answer.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics."""

    registry: Any
    token: str
    timeout = _REQUEST_S
    # With the library's default, HTTP/0.9, the answer to a malformed request has no status line.
    default_request_version = "HTTP/1.0"

    def do_GET(self) -> None:
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        if self.path.partition("?")[0] != "/metrics":
            return self._answer(404, "text/plain", b"there is only /metrics\n")
        given = self.headers.get("Authorization", "")
        if self.token and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return self._answer(401, "text/plain", b"a token is needed\n")
        return self._answer(200, CONTENT_TYPE_LATEST, generate_latest(self.registry))

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests: there is one every few seconds."""


def token_of(run_dir: Path) -> str:
    """Return the token of a run's `/metrics`. It is derived from the run's secret, and admits to nothing else."""
    return secret.key_for(b"metrics", secret.read(run_dir)).hex()


def write_token(run_dir: Path, token: str) -> None:
    """Write the token to a file that only the user can read. Raises OSError."""
    path = run_dir / TOKEN_FILE

    def write() -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(token)

    files.retrying(path, write)


def start_exporter(plan: Plan, host: str, collector: Any) -> Exporter | None:
    """Serve a run's metrics as the site says; None if it says no, or if the head cannot serve them."""
    if plan.prometheus == "off" or not host:  # preflight reports a node without an address
        return None
    run_dir = Path(plan.run_dir)
    try:
        token = token_of(run_dir) if plan.prometheus == "token" else ""
        if token:
            write_token(run_dir, token)
        return Exporter(host, collector, token)
    except (ImportError, OSError, secret.SecretError) as error:
        log.warning("no metrics for Prometheus: %s", error)
        return None


def targets(plan: Plan, addresses: Addresses, head: str | None) -> list[Target]:
    """Return everything to scrape, in the format of Prometheus' file_sd. `head` is the address of its exporter."""
    labels = {"run": plan.run}
    of_head = [{"targets": [head], "labels": {**labels, "role": "head", "process": "head"}}] if head else []
    return of_head + list(_of_processes(plan, addresses, labels))


def _of_processes(plan: Plan, addresses: Addresses, labels: dict[str, str]) -> Iterator[Target]:
    lost = set(addresses.lost)
    for process in plan.processes():
        port = addresses.ports.get(process.name, {}).get(_PORTS.get(process.role, ""))
        host = addresses.hosts.get(process.name)
        if port is None or host is None or process.name in lost:
            continue
        replica = {} if process.replica is None else {"replica": str(process.replica)}
        yield {
            "targets": [f"{host}:{port}"],
            "labels": {**labels, "role": process.role, "process": process.name, **replica},
        }


PREFIX = "primeslurm_"
# First parts of metric names. A metric with another first part was reported by the environment of that name.
COMPONENTS = frozenset(
    {
        *("reward", "groups", "length_penalty", "trainer", "staleness", "rollouts", "router_replay", "teacher"),
        *("throughput", "policy", "queue"),
    }
)
# Metrics that the exporter adds to those of rows.
INFO, ATTEMPT, PROCESSES = f"{PREFIX}run_info", f"{PREFIX}attempt", f"{PREFIX}processes"
STEP, STEP_TIME = f"{PREFIX}step", f"{PREFIX}step_timestamp_seconds"
GPU_HOURS, TRAINED_TOKENS = f"{PREFIX}gpu_hours_total", f"{PREFIX}trained_tokens_total"
_OTHER = re.compile(r"[^a-zA-Z0-9_]")


def labelled(name: str) -> tuple[str, dict[str, str]]:
    """Return the Prometheus name and the labels of a metric of a row."""
    match name.split("/"):
        case ["engines", role, *rest] if rest:
            family, labels = ["engines", *rest], {"role": role}
        case ["env" | "eval" as kind, environment, *rest] if rest:
            family, labels = [kind], {"environment": environment, "metric": "/".join(rest)}
        case ["memory", *rest]:
            family, labels = ["memory"], {"metric": "/".join(rest)}
        case [component, *_] as parts if component in COMPONENTS or component == "eval":
            family, labels = parts, {}
        case [environment, *rest]:
            family, labels = ["environment"], {"environment": environment, "metric": "/".join(rest)}
    return PREFIX + _OTHER.sub("_", "_".join(family)), labels


class RunCollector:
    """Reads a run's metrics at each scrape. A collector of prometheus_client."""

    def __init__(self, plan: Plan, attempt: int, view: Callable[[], FleetView]) -> None:
        self._plan, self._attempt, self._view = plan, attempt, view
        self._rows = _Rows(Path(plan.run_dir) / FILE)
        self._lock = threading.Lock()
        self._roles = {process.name: process.role for process in plan.processes()}

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """Return all metrics. Every one has the label `run`."""
        with self._lock:  # each scrape has its own thread, and two must not count the same rows
            self._rows.refresh()
            return list(self._metrics())

    def _metrics(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        run = self._plan.run
        yield _gauge(INFO, "The run.", {"run": run, "task": self._plan.task}, 1)
        yield _gauge(ATTEMPT, "Number of the attempt.", {"run": run}, self._attempt)
        processes = GaugeMetricFamily(PROCESSES, "Processes by role and state.", labels=["run", "role", "state"])
        states = Counter((self._roles.get(name, ""), state) for name, state in self._view().states.items())
        for (role, state), count in sorted(states.items()):
            processes.add_metric([run, role, state], count)
        yield processes
        if self._rows.newest:
            yield _gauge(STEP, "Last trained step.", {"run": run}, self._rows.newest["step"])
            yield _gauge(STEP_TIME, "Time of the last trained step.", {"run": run}, self._rows.newest.get("time", 0))
        yield from _families(run, self._rows.newest | self._rows.evaluations)
        hours = CounterMetricFamily(GPU_HOURS, "GPU-hours of all trained steps.", labels=["run", "role"])
        for role, value in sorted(self._rows.gpu_hours.items()):
            hours.add_metric([run, role], value)
        yield hours
        tokens = CounterMetricFamily(TRAINED_TOKENS, "Trained tokens of all steps.", labels=["run"])
        tokens.add_metric([run], self._rows.tokens)
        yield tokens


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _families(run: str, row: Row) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of a row, those of the same name together."""
    from prometheus_client.core import GaugeMetricFamily

    families: dict[str, GaugeMetricFamily] = {}
    for name, value in row.items():
        if name in ("step", "time"):
            continue
        family, labels = labelled(name)
        if family not in families:
            text = f"See docs/reference/metrics.md: {name}" if not labels else "See docs/reference/metrics.md."
            families[family] = GaugeMetricFamily(family, text, labels=["run", *labels])
        families[family].add_metric([run, *labels.values()], value)
    yield from families.values()


class _Rows:
    """The end of metrics.jsonl, and sums over all of it. Each line is read once."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._reset()

    def _reset(self) -> None:
        self.newest: Row = {}
        self.evaluations: Row = {}
        self.gpu_hours: dict[str, float] = defaultdict(float)
        self.tokens = 0.0

    def refresh(self) -> None:
        """Read the new lines. When a run resumes, its file is replaced, and all of it is read again."""
        complete = False
        while not complete:
            try:
                lines, replaced, complete = self._file.appended()
            except OSError:
                return
            if replaced:
                self._reset()
            for row in filter(None, map(parse_row, lines)):
                self._add(row)

    def _add(self, row: Row) -> None:
        if is_evaluation(row):
            self.evaluations |= {name: value for name, value in row.items() if name not in ("step", "time")}
            return
        self.newest = row = with_rl_names(row)
        self.tokens += row.get("trainer/tokens", 0.0)
        for name, value in row.items():
            *prefix, last = name.split("/")
            if last == "gpu_hours":
                self.gpu_hours[prefix[-1]] += value
