"""`task: serve` on the command line: engines and a router on this machine until cancelled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.strangers import watching_for

pytestmark = pytest.mark.engine


ROOT = Path(__file__).resolve().parents[2]


def primeslurm(*args: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "primeslurm", *args]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait(run: str, condition: Callable[[dict[str, Any]], object], timeout_s: float = 900) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not condition(status := json.loads(primeslurm("status", run, "--processes", "--json"))):
        assert time.monotonic() < deadline and status["phase"] not in ("failed", "lost"), status
        time.sleep(1)
    return status


def test_a_served_model_answers_until_it_is_cancelled(model: Path, tmp_path: Path) -> None:
    recipe = {
        "schema": 1,
        "name": "serve-test",
        "task": "serve",
        "seq_len": 512,
        "model": {"path": str(model), "dtype": "float32"},
        "inference": {
            "kv_cache_bytes": 2**24,
            "kv_offload": {"type": "native", "cpu": {"bytes": 2**22}, "disk": {"path": str(tmp_path / "disk")}},
        },
        "deployment": {"inference": {"type": "single_node", "gpus_per_node": 1}},
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with watching_for(tmp_path / "runs" / "serve-test" / "secret"):
        _serve(path, tmp_path)


def _serve(path: Path, tmp_path: Path) -> None:
    run = json.loads(primeslurm("submit", str(path), "--local", "--json", cwd=tmp_path))["directory"]
    try:
        status = wait(run, lambda s: {p["state"] for p in s["processes"]} == {"HEALTHY"})
        assert status["phase"] == "running"
        assert sorted(p["role"] for p in status["processes"]) == ["engine", "router"]
        addresses = json.loads(next(Path(run).glob("attempts/1/addresses.json")).read_text())
        host, port = addresses["hosts"]["router-0"], addresses["ports"]["router-0"]["http"]
        body = {"model": "policy", "prompt": [2, 5, 9, 14], "max_tokens": 4, "ignore_eos": True}
        url = f"http://{host}:{port}/v1/completions"
        assert httpx.post(url, json=body, timeout=120).status_code == 401
        token = {"Authorization": f"Bearer {(Path(run) / 'secret').read_text().strip()}"}
        answer = httpx.post(url, json=body, headers=token, timeout=120)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert list((tmp_path / "disk").iterdir())
    finally:
        primeslurm("cancel", run)
    wait(run, lambda s: s["phase"] == "cancelled")
    assert not [p for p in status["processes"] if alive(p["pid"])]
    assert list((tmp_path / "disk").iterdir()) == []
