"""A pause of a prefill engine does not wait for decode engines.

An engine keeps the KV of a prompt that it has computed until a decode engine has taken it, and vLLM counts that as work
that a pause waits for. Where decode engines are paused too, as for a new policy, nobody takes it: the pause ends when
the lease of that KV does, and what decode engines take afterwards may be that of other prompts. No weight is read for
KV that lies there, so a pause that keeps requests is complete as soon as nothing is computed.
"""

from __future__ import annotations

import functools
from typing import Any

from primeslurm.inference.guards import expect


def use() -> None:
    """Have engine cores of this process complete their pauses so.

    Raises:
        RuntimeError: vLLM is not the version that this was written for.
    """
    from vllm.v1.engine.core import EngineCoreProc

    step = expect(EngineCoreProc, "_process_engine_step", ["self"])
    expect(EngineCoreProc, "_notify_idle_state_callbacks", ["self"])
    expect(EngineCoreProc, "_finish_pause", ["clear_cache"])

    @functools.wraps(step)
    def process_engine_step(core: Any) -> bool:
        if core._idle_state_callbacks and computes_nothing(core):
            core._notify_idle_state_callbacks()
        return bool(step(core))

    EngineCoreProc._process_engine_step = process_engine_step


def computes_nothing(core: Any) -> bool:
    """Whether all that a paused core still has to do is to keep KV for others.

    Args:
        core: vLLM's `EngineCoreProc`.

    Returns:
        False as well if it is not paused, or its group of data-parallel ranks has yet to agree on the pause.
    """
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    if scheduler.pause_state is not PauseState.PAUSED_ALL or core.engines_running or scheduler.finished_req_ids:
        return False
    return not any(batch.total_num_scheduled_tokens for _, batch, _ in core.batch_queue or ())
