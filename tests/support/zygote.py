"""Imports vLLM once, then forks an API server for every line of JSON on stdin.

{"argv", "env", "log", "measured"} -> {"pid"}
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

from primeslurm.base.imports import uncollected

PRELOAD = (
    "model_hosting_container_standards.sagemaker",
    "prometheus_fastapi_instrumentator",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_moe",
    "uvicorn.protocols.http.httptools_impl",
)


def serve(request: dict[str, Any]) -> None:
    """Become an API server in a new session. Never return."""
    os.setsid()
    if not request["measured"]:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        os.environ.pop("COVERAGE_PROCESS_START", None)  # also for its child processes
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    sys.argv = ["api_server", *request["argv"]]

    from vllm.entrypoints.launchers.api_server.entry import main

    main()


def run() -> None:
    """Import, report it, and serve requests until stdin closes."""
    with uncollected():  # vLLM collects garbage around every model load, too
        for module in PRELOAD:
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                serve(request)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    run()
