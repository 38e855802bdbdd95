"""Patches of vLLM's engine processes, and the check that vLLM's code is as a patch expects it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Option of an engine that is one of several data-parallel ranks.
RANKS_OPTION = "--data-parallel-size"
INSPECTION_S = 60.0  # timeout for the inspection of a model class in a fork
log = logging.getLogger(__name__)
# vLLM's own functions that start the processes of a data-parallel rank.
_originals: dict[str, Any] = {}


def expect(owner: type | ModuleType, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Return the method or function `name` of `owner`. Raise RuntimeError unless it has these parameters."""
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if method is None:
        raise changed_code_error(f"{owner.__name__}.{name} is missing")
    missing = [p for p in parameters if p not in inspect.signature(method).parameters]
    if missing:
        raise changed_code_error(f"{owner.__name__}.{name} has no parameter {', '.join(missing)}")
    return method


def changed_code_error(difference: str) -> RuntimeError:
    """Return the error for vLLM code that differs from what a patch expects."""
    import vllm

    where = "primeslurm/inference and primeslurm/testbed/cpu_engine"
    return RuntimeError(f"vLLM {vllm.__version__}: {difference}. primeslurm patches vLLM 0.32; see {where}")


def pause_with_kept_blocks() -> None:
    """Let a prefill engine pause before decode engines have fetched its KV blocks."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCoreProc

    step = expect(EngineCoreProc, "_process_engine_step", ["self"])
    expect(EngineCoreProc, "_notify_idle_state_callbacks", ["self"])
    expect(EngineCoreProc, "_finish_pause", ["clear_cache"])

    def computes_nothing(core: Any) -> bool:
        scheduler = core.scheduler
        # `engines_running`: the data-parallel group has not agreed on the pause yet.
        if scheduler.pause_state is not PauseState.PAUSED_ALL or core.engines_running or scheduler.finished_req_ids:
            return False
        return not any(batch.total_num_scheduled_tokens for _, batch, _ in core.batch_queue or ())

    # vLLM's pause waits until decode engines have fetched all KV blocks. During a weight update decode engines are
    # paused, too, so the pause would last until the lease of the blocks expires, and later fetches might get the blocks
    # of other prompts. Kept blocks need no weights, so the pause is complete as soon as nothing is being computed.
    @functools.wraps(step)
    def process_engine_step(core: Any) -> bool:
        if core._idle_state_callbacks and computes_nothing(core):
            core._notify_idle_state_callbacks()
        return bool(step(core))

    EngineCoreProc._process_engine_step = process_engine_step


def wait_for_late_ranks() -> None:
    """Let a data-parallel rank wait for the others as long as an engine may take to start."""
    # vLLM waits five minutes for the address of rank 0, and two for the process that coordinates the ranks. Both import
    # vLLM first, which takes longer than that on a slow file system.
    from vllm import envs
    from vllm.v1.engine import coordinator, core

    if not hasattr(core, "HANDSHAKE_TIMEOUT_MINS"):
        raise changed_code_error("core.HANDSHAKE_TIMEOUT_MINS is missing")
    core.HANDSHAKE_TIMEOUT_MINS = max(core.HANDSHAKE_TIMEOUT_MINS, math.ceil(envs.VLLM_ENGINE_READY_TIMEOUT_S / 60))
    expect(coordinator.DPCoordinator, "_wait_for_zmq_addrs", ["self", "zmq_addr_pipe"])
    coordinator.DPCoordinator._wait_for_zmq_addrs = coordinator_addresses


def coordinator_addresses(coordinator: Any, zmq_addr_pipe: Any) -> Any:
    """Return the addresses that the coordinator process sends. Raise RuntimeError if it ends or sends none in time."""
    from vllm import envs

    with zmq_addr_pipe:
        timeout_s = envs.VLLM_ENGINE_READY_TIMEOUT_S
        if not multiprocessing.connection.wait([zmq_addr_pipe, coordinator.proc.sentinel], timeout=timeout_s):
            raise RuntimeError(f"the coordinator of the data-parallel ranks is not ready after {timeout_s} s")
        try:
            return zmq_addr_pipe.recv()
        except EOFError:
            raise RuntimeError("the coordinator of the data-parallel ranks ended while it started") from None


def inspect_models_in_forks() -> None:
    """Let vLLM inspect model classes in a fork, which need not import vLLM again.

    If the fork fails, vLLM's own way follows: a new process.
    """
    from vllm.model_executor.models import registry

    start_process = expect(registry, "_run_in_subprocess", ["fn"])

    def run(fn: Callable[[], Any]) -> Any:
        if multiprocessing.current_process().daemon:  # such as a worker, which may not have children
            return start_process(fn)
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=lambda: sender.send(fn()), daemon=True)
        # A fork fails, for example, if the module uses CUDA at import, and this process has used it before.
        with receiver, contextlib.suppress(EOFError, OSError):
            child.start()
            sender.close()
            try:
                if receiver.poll(INSPECTION_S):
                    return receiver.recv()
            finally:
                child.kill()
                child.join()
        log.warning("cannot inspect a model class in a fork; starting a new process for it")
        return start_process(fn)

    registry._run_in_subprocess = run


def load_plugins_early(argv: Sequence[str]) -> None:
    """Load plugins first in the processes that vLLM spawns, if `argv` belongs to a data-parallel rank."""
    # These processes connect to each other before vLLM loads plugins, or without loading them. Their sockets and stores
    # would not be protected.
    if not any(word.partition("=")[0] == RANKS_OPTION for word in argv):
        return
    from vllm.v1.engine.coordinator import DPCoordinatorProc
    from vllm.v1.engine.core import EngineCoreProc

    _originals["core"] = expect(EngineCoreProc, "run_engine_core", ["dp_rank"])
    _originals["coordinator"] = expect(DPCoordinatorProc, "run_coordinator", ["engine_count"])
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


# Functions of a module, because the processes are spawned: their targets are pickled by name.
def run_engine_core(*args: Any, **kwargs: Any) -> None:
    _run("core", *args, **kwargs)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    _run("coordinator", *args, **kwargs)


def _run(process: str, *args: Any, **kwargs: Any) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    _originals[process](*args, **kwargs)
