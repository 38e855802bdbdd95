"""A Dynamo worker that also has vLLM's HTTP server: `python -m primeslurm.inference.dynamo_worker WORKER -- SERVER`.

WORKER are the arguments of `python -m dynamo.vllm`, SERVER those of vLLM's server. Requests of rollouts come from
Dynamo's frontend. Weight updates, status and health use the HTTP server, as with other routers. Works with
ai-dynamo 1.6.1, which was made for vLLM 0.31.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from typing import Any

from primeslurm.inference import patches
from primeslurm.inference.liveness_gate import LivenessGate
from primeslurm.inference.prefill_version import PREFILL_VERSION, with_prefill
from primeslurm.wire.names import SERVER_OPTIONS_FOLLOW

# Interval of checks whether a worker's policy is confirmed [s]
POLL_S = 0.1

# Running servers, because asyncio only keeps weak references to tasks.
_servers: set[asyncio.Task[None]] = set()


class GateClosedError(RuntimeError):
    """The engine must not generate now. Dynamo's frontend then answers 5xx, and clients retry."""


def main() -> None:
    words = sys.argv[1:]
    at = words.index(SERVER_OPTIONS_FOLLOW)
    from vllm.v1.engine import utils

    # dynamo/vllm/embedding_worker_processes.py, line 32, imports this function, which vLLM 0.32 has no more. Only
    # Dynamo's embedding workers call it.
    vars(utils).setdefault("get_engine_zmq_addresses", None)
    from dynamo.vllm import main as dynamo_main
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words[at + 1 :])
    sys.argv[1:] = words[:at]
    _serve_before_registration(dynamo_main, args)
    dynamo_main.main()


def _serve_before_registration(dynamo_main: Any, args: Namespace) -> None:
    """Make a Dynamo worker register with its frontend only once its HTTP server runs and its policy is confirmed."""
    names = ["model_input", "model_type", "generate_endpoint", "config", "engine_client", "vllm_config", "worker_type"]
    register = patches.expect(dynamo_main, "register_vllm_model", [*names, "needs"])

    async def serve_and_register(*values: Any, **named: Any) -> None:
        from dynamo.llm import WorkerType

        engine: Any = dict(zip(names, values, strict=False))["engine_client"]
        gate = await _serve(engine, args)
        while gate.refusal():
            await asyncio.sleep(POLL_S)
        engine.generate = gated(engine.generate, gate, prefills=named["worker_type"] == WorkerType.Prefill)
        await register(*values, **named)

    dynamo_main.register_vllm_model = serve_and_register


def gated(
    generate: Callable[..., AsyncIterator[Any]], gate: LivenessGate, prefills: bool
) -> Callable[..., AsyncIterator[Any]]:
    """Return `generate` behind the gate, with the policy versions of its tokens in the last output's KV parameters.

    `prefills`: this is a prefill engine. It tells its decode engine the policy version (see `prefill_version`).
    """

    @functools.wraps(generate)  # Dynamo looks at the parameters
    async def gated_generate(prompt: Any, sampling_params: Any, *values: Any, **named: Any) -> AsyncIterator[Any]:
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        if reason := gate.refusal(salt or ""):
            raise GateClosedError(reason)
        transfer = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        version = transfer.pop(PREFILL_VERSION, None)
        async for output in generate(prompt, sampling_params, *values, **named):
            spans = output.outputs[0].weight_versions if output.outputs else None
            if spans and prefills:
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), PREFILL_VERSION: spans[0].version}
            elif spans:
                # Dynamo's frontend drops all fields that it does not know, but does not look into this one.
                versions = [
                    {"version": span.version, "start": span.start, "end": span.end}
                    for span in with_prefill(spans, version)
                ]
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), "weight_versions": versions}
            yield output

    return gated_generate


async def _serve(engine: Any, args: Namespace) -> LivenessGate:
    """Start vLLM's HTTP server for an engine in this process. Return the server's middleware."""
    import uvicorn
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.utils.import_utils import resolve_obj_by_qualname

    (middleware,), args.middleware = args.middleware, []
    tasks = await engine.get_supported_tasks()
    # Dynamo sets this variable too late for prometheus_client, which keeps values in memory. /metrics would read the
    # empty directory.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    gate: LivenessGate = resolve_obj_by_qualname(middleware)(app)
    config = uvicorn.Config(gate, host=args.host, port=args.port, log_level="warning", access_log=False)
    server = NoSignalServer(config)
    app.state.server = server
    _servers.add(asyncio.create_task(server.serve()))
    return gate


if __name__ == "__main__":
    main()
