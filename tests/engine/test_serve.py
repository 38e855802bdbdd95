"""`task: serve` on the command line: engines and a router on this machine until cancelled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.strangers import watching_for
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine


ROOT = Path(__file__).resolve().parents[2]


def primeslurm(*args: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "primeslurm", *args]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait(run: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        status = json.loads(primeslurm("status", run, "--processes", "--json"))
        assert status["phase"] not in ("failed", "lost"), status
        return status if condition(status) else None

    return wait_until(look, timeout_s=800, poll_s=1)


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
