"""Patch of vLLM: a pause of a prefill engine does not wait until decode engines have fetched KV blocks."""

from __future__ import annotations

import functools
from typing import Any

from primeslurm.inference.guards import expect


def use() -> None:
    """Patch the engine cores of this process. Raise RuntimeError if vLLM's code has changed."""
    from vllm.v1.engine.core import EngineCoreProc

    step = expect(EngineCoreProc, "_process_engine_step", ["self"])
    expect(EngineCoreProc, "_notify_idle_state_callbacks", ["self"])
    expect(EngineCoreProc, "_finish_pause", ["clear_cache"])

    # vLLM's pause waits until decode engines have fetched all KV blocks. During a weight update decode engines are
    # paused, too, so the pause would last until the lease of the blocks expires, and later fetches might get the blocks
    # of other prompts. Kept blocks need no weights, so the pause is complete as soon as nothing is being computed.
    @functools.wraps(step)
    def process_engine_step(core: Any) -> bool:
        if core._idle_state_callbacks and computes_nothing(core):
            core._notify_idle_state_callbacks()
        return bool(step(core))

    EngineCoreProc._process_engine_step = process_engine_step


def computes_nothing(core: Any) -> bool:
    """Return whether a paused `EngineCoreProc` only keeps KV blocks for other engines."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    # `engines_running`: the data-parallel group has not agreed on the pause yet.
    if scheduler.pause_state is not PauseState.PAUSED_ALL or core.engines_running or scheduler.finished_req_ids:
        return False
    return not any(batch.total_num_scheduled_tokens for _, batch, _ in core.batch_queue or ())
