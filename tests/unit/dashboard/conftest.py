"""A directory of runs, and a browser's view of the dashboard over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from primeslurm.dashboard.access import TOKEN
from primeslurm.dashboard.job_states import JobStates
from primeslurm.dashboard.routes import application
from primeslurm.dashboard.run_data import RunIndex
from tests.support.clock import Clock
from tests.support.recorded_runs import recorded_run, write_evaluations, write_rollouts

SECRET = "a-token"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs")


def write_runs(directory: Path) -> Path:
    """Write two runs: `r`, which has completed, and `s`, which is a bit shorter."""
    run = recorded_run(directory / "r")
    write_evaluations(run)
    write_rollouts(run)
    recorded_run(directory / "s", 20, outcome="failed")
    return directory


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(runs: Path, clock: Clock) -> Iterator[RunIndex]:
    states = JobStates(lambda run: lambda job: None, clock)
    yield RunIndex(runs, states, clock)
    states.close()


@pytest.fixture
def anyone(index: RunIndex) -> TestClient:
    """A client without the token."""
    app = application(index, SECRET, ["localhost", "login1"])
    return TestClient(app, base_url="http://localhost:8420", follow_redirects=False, raise_server_exceptions=False)


@pytest.fixture
def client(anyone: TestClient) -> TestClient:
    """A client that has opened the address with the token."""
    assert anyone.get("/", params={TOKEN: SECRET}).status_code == 303
    return anyone
