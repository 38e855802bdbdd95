"""CPU cost of single stages of a rollout's way in one thread: from an engine's response to a group on disk.

All in CPU seconds, alternating with copies of as many bytes: into used memory, and into new memory, which the kernel
must find and clear first, as for every rollout.
"""

from __future__ import annotations

import base64
import io
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.support.data_path_receive import JOB, TOKENS, in_process, made, rollout, size_of
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Result, decode_sequences, encode_result
from primeslurm.orchestrator.worker.generate_endpoint import completion_of
from primeslurm.plan.commands.processes import HUGE_PAGES
from primeslurm.wire.decoding import decode_msgpack

# Tokens of a completion that samples a rollout in one turn. With tools it has a few thousand.
SAMPLED = 130_000


def measure(rollouts: int) -> dict[str, Any]:
    """Measure one rollout. The argument is ignored."""
    os.environ |= HUGE_PAGES
    return in_process(stages)


def stages() -> dict[str, Any]:
    """Return the cost of each stage for one rollout, in this process, and of copies in memory."""
    experts = made(0)
    found, target = rollout(JOB, experts), np.empty_like(experts)
    payload = size_of(found)
    file = io.BytesIO()
    np.save(file, experts[:-1])
    choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}}
    choice["weight_versions"] = [{"version": "1", "start": 0, "end": 1}]
    choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    answer = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
    head, *frames = encode_result("j", [found])
    group = RolloutGroup("g", "e", 0, 0, ((found,),))
    spooled = group.to_bytes()
    sampled = {
        "token_ids": list(range(10_000, 10_000 + SAMPLED)),
        "logprobs": {"content": [{"token": f"token_id:{n}", "logprob": -n / SAMPLED} for n in range(SAMPLED)]},
        "weight_versions": [{"version": "1", "start": 0, "end": SAMPLED}],
    }
    of_one_turn = json.dumps({"choices": [choice | sampled]}, separators=(",", ":")).encode()
    scale = payload / experts.nbytes
    seconds = {
        "copy_in_memory": best(lambda: np.copyto(target, experts)) * scale,
        "copy_to_new_memory": best(lambda: np.copyto(np.empty_like(experts), experts)) * scale,
        "read_engines_answer": best(lambda: completion_of(answer, TOKENS - 1, 0)),
        "read_engines_answer_of_one_turn": best(lambda: completion_of(of_one_turn, TOKENS - SAMPLED, 0)),
        "encode_result": best(lambda: encode_result("j", [found])),
        "decode_result": best(lambda: decode_sequences(decode_msgpack(head, Result), frames)),
        "encode_group": best(group.to_parts),
        "decode_group": best(lambda: RolloutGroup.from_bytes(spooled)),
    }
    copies = seconds["copy_in_memory"], seconds["copy_to_new_memory"]
    return {name: rates(spent, payload, *copies) for name, spent in seconds.items()}


def best(action: Callable[[], object], times: int = 15) -> float:
    """Return the lowest CPU time of several runs, including the kernel's [s]."""
    spent = []
    for _ in range(times):
        began = time.thread_time()
        action()
        spent.append(time.thread_time() - began)
    return min(spent)


def rates(seconds: float, payload: int, copying: float, copying_to_new: float) -> dict[str, float]:
    """Return the cost of one stage relative to a copy into used memory, and to one into new memory."""
    return {
        "cpu_ms": round(1e3 * seconds, 2),
        "gb_a_cpu_second": round(payload / seconds / 1e9, 2),
        "of_a_copy": round(copying / seconds, 2),
        "of_a_copy_to_new_memory": round(copying_to_new / seconds, 2),
    }
