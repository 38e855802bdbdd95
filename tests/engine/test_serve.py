"""`task: serve` on the command line: engines and a router on this machine until cancelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from primeslurm.api.runs.run import Run
from primeslurm.base.files import read_json
from primeslurm.run.status.run_status import RunStatus
from primeslurm.wire.transport import secret
from tests.support.cli import run_python
from tests.support.strangers import watching_for
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait(run: Run, condition: Callable[[RunStatus], object]) -> RunStatus:
    def look() -> RunStatus | None:
        status = run.status(processes=True)
        assert status.phase not in ("failed", "lost"), status
        return status if condition(status) else None

    return wait_until(look, timeout_s=800, poll_s=0.5)


def test_a_served_model_answers_until_it_is_cancelled(model: Path, tmp_path: Path) -> None:
    recipe = {
        "schema": 1,
        "name": "serve-test",
        "task": "serve",
        "seq_len": 512,
        "model": {"path": str(model), "dtype": "float32"},
        "inference": {
            "kv_cache_bytes": 2**24,
            "kv_offload": {
                "type": "native",
                "cpu": {"bytes": 2**22},
                "disk": {"path": str(tmp_path / "disk"), "bytes": 2**26},
            },
        },
        "deployment": {"inference": {"type": "single_node", "gpus_per_node": 1}},
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with watching_for(tmp_path / "runs" / "serve-test" / "secret"):
        _serve(path, tmp_path)


def _serve(path: Path, tmp_path: Path) -> None:
    submitted = run_python("-m", "primeslurm", "submit", path, "--local", "--json", cwd=tmp_path)
    assert submitted.code == 0, submitted.err
    run = Run(Path(json.loads(submitted.out)["directory"]))
    try:
        status = wait(run, lambda status: {process.state for process in status.processes} == {"HEALTHY"})
        assert status.phase == "running"
        assert sorted(process.role for process in status.processes) == ["engine", "router"]
        addresses = read_json(run.directory.attempt(1).addresses_file)
        assert addresses is not None
        host, port = addresses["hosts"]["router-0"], addresses["ports"]["router-0"]["http"]
        body = {"model": "policy", "prompt": [2, 5, 9, 14], "max_tokens": 4, "ignore_eos": True}
        url = f"http://{host}:{port}/v1/completions"
        assert httpx.post(url, json=body, timeout=120).status_code == 401
        token = {"Authorization": f"Bearer {secret.read(run.path)}"}
        answer = httpx.post(url, json=body, headers=token, timeout=120)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert list((tmp_path / "disk").iterdir())
    finally:
        assert run_python("-m", "primeslurm", "cancel", run.path, cwd=tmp_path).code == 0
    wait(run, lambda status: status.phase == "cancelled")
    assert not [process for process in status.processes if process.pid and alive(process.pid)]
    assert list((tmp_path / "disk").iterdir()) == []
