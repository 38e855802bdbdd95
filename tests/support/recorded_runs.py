"""Run directories of runs that have trained, as their processes would have written them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from primeslurm.base.files import write_json
from primeslurm.plan.model import Process, Replica
from primeslurm.records import rollout_files
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.records.evaluation import Estimated, EvaluationRecord, LabelResult, step_dir
from primeslurm.records.fleet import AgentReport, AssignedAgent, AssignmentRecord, FleetView, ProcessReport
from primeslurm.records.rollout_files import FileName, StoredConversation, StoredRollout, StoredSequence
from primeslurm.records.rollouts import Message, MessageSpan, RolloutSummary, ToolCall
from primeslurm.run.directory import RunDirectory
from tests.support.plans import plan_of, python

T0 = 1_790_000_000.0
HOSTILE = "<img src=x onerror=\"document.title='executed'\"><script>document.title='executed'</script>\"'&"
"""A text that a page must show as it is."""
RECIPE = {
    "name": "r",
    "task": "rl",
    "max_steps": 30,
    "orchestrator": {"batch_size": 8},
    "evaluation": {"keep_best": "held-out/pass@4"},
    "environments": [{"id": "math"}, {"id": "code"}],
}
PROCESSES = (
    ("orchestrator", "orchestrator"),
    ("trainer-rank-0", "trainer"),
    ("router-0", "router"),
    ("decode-r0-0", "decode"),
    ("prefill-r0-0", "prefill"),
)


def metrics_row(step: int, of: int = 30) -> dict[str, float]:
    """Return the metrics of one step of a run that learns."""
    done = step / of
    return {
        "step": step,
        "time": T0 + 20 * step,
        "reward/mean": round(0.1 + 0.8 * done + 0.05 * math.sin(step), 4),
        "reward/std": 0.3,
        "math/reward": round(done, 4),
        "code/reward": round(done / 2, 4),
        "staleness/mean": 1.0 + math.sin(step / 3),
        "staleness/max": 2.0,
        "trainer/loss": -0.1,
        "trainer/entropy": 1.2 - done,
        "trainer/mismatch_kl": 1e-4 * (1 + abs(math.sin(step))),
        "trainer/grad_norm": 1.0,
        "trainer/tokens": 8192.0,
        "trainer/tokens_per_s": 900.0,
        "trainer/seconds/wait": 2.0,
        "trainer/seconds/forward_backward": 12.0,
        "trainer/seconds/optimizer": 1.0,
        "trainer/seconds/publish": 3.0,
        "throughput/step_seconds": 20.0 + math.sin(step),
        "throughput/tokens_per_s": 1500.0 + 10 * step,
        "rollouts/sampled_mean": 200.0 + step,
        "rollouts/length_mean": 400.0 + step,
        "queue/inflight": 40.0,
        "queue/ready_groups": 3.0,
        "engines/decode/kv_usage_mean": 0.6,
        "engines/prefill/kv_usage_mean": 0.2,
        "unheard/of": float(step),
    }


def recorded_run(path: Path, steps: int = 30, *, outcome: str = "completed", processes: int = 5) -> RunDirectory:
    """Write a run with two attempts, of which the first failed for a hostile reason.

    Args:
        path: directory of the run.
        steps: number of trained steps.
        outcome: end of the second attempt; empty for a run that has not ended.
        processes: how many of `PROCESSES` it has.
    """
    run = RunDirectory(path)
    made = tuple(
        Process(name=name, role=role, node=i % 2, argv=python("pass"), log=f"logs/{role}/{name}.log", gpus=(i,))  # type: ignore[arg-type]
        for i, (name, role) in enumerate(PROCESSES[:processes])
    )
    replicas = (Replica(index=0, router="router-0", engines=("decode-r0-0", "prefill-r0-0"), nodes=(0, 1)),)
    plan = plan_of(path, made[::2], made[1::2], replicas=replicas if processes == 5 else ())
    for number in (1, 2):
        attempt = run.attempt(number)
        attempt.prepare(plan)
        begin = T0 + 4000 * (number - 1)
        attempt.record_job(JobRecord(str(6 + number), "slurm", begin))
        events: list[dict[str, Any]] = [
            {"time": begin, "process": "head", "kind": "seated", "nodes": ["n1"]},
            {"time": begin + 90, "process": "agent-0", "kind": "start_failed", "name": "decode-r0-0", "error": HOSTILE},
            {"time": begin + 95, "process": "agent-0", "kind": "started", "name": "decode-r0-0", "restarts": 1},
        ]
        (attempt.path / "events" / "head.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        for process in made:
            log = attempt.path / process.log
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("".join(f"line {i} of {process.name}\n" for i in range(50)))
        end = outcome if number == 2 else "failed"
        if end:
            attempt.record_end(EndRecord(end, HOSTILE, "", steps, number == 1, "", begin + 3600))
    latest = run.attempt(2)
    states = {process.name: "HEALTHY" for process in made}
    write_json(latest.fleet_file, msgspec.to_builtins(FleetView(T0 + 4000, states=states)))
    assignment = AssignmentRecord(1, {0: AssignedAgent(0, "n001"), 1: AssignedAgent(1, "n002")})
    write_json(latest.assignment_file, msgspec.to_builtins(assignment, str_keys=True))
    for index, node in enumerate(plan.nodes):
        beats = {process.name: ProcessReport("ready", 42) for process in node.processes}
        report = AgentReport(index, f"n00{index + 1}", "10.0.0.1", T0 + 4000, 7, node=index, processes=beats)
        write_json(latest.agent_file(index), msgspec.to_builtins(report))
    write_json(path / "lock.json", {"run_id": f"{path.name}-1", "created_at": T0, "packages": {"vllm": "0.32"}})
    write_json(path / "recipe.resolved.json", RECIPE | {"name": path.name})
    (path / "recipe.yaml").write_text(f"name: {path.name}\n# {HOSTILE}\n")
    write_metrics(run, range(1, steps + 1))
    return run


def write_metrics(run: RunDirectory, steps: range, mode: str = "w") -> None:
    """Write the rows of these steps to metrics.jsonl."""
    with (run.path / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(metrics_row(step, max(steps.stop - 1, 30))) + "\n" for step in steps)


def write_evaluations(run: RunDirectory) -> None:
    """Write three evaluations of the environment `held-out`, with samples of the last one."""
    for step, reward in ((0, 0.25), (10, 0.75), (20, 0.5)):
        result = LabelResult("held-out", 16, 4, Estimated(reward, 0.0625), {1: Estimated(0.1), 4: Estimated(reward)})
        record = EvaluationRecord(step, step, step, step + 2, T0, 61.0, [result])
        directory = step_dir(run.path, step)
        directory.mkdir(parents=True)
        write_json(directory / "summary.json", msgspec.to_builtins(record, str_keys=True))
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": T0 + 20 * step, **record.row()}) + "\n")
    sample = {"reward": 1.0, "tokens": 9, "turns": 1, "finish_reason": "stop", "seconds": 2.0, "sample": 0}
    sample |= {"oldest_version": 20, "newest_version": 20, "metrics": {}, "error": None}
    lines = [
        {"example": i, "reward": 0.5, "samples": [sample, sample | {"sample": 1, "reward": 0.0, "error": HOSTILE}]}
        for i in range(16)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (step_dir(run.path, 20) / "held-out.jsonl").write_text(text)


def stored_rollout(texts: Sequence[tuple[str, str]], versions: Sequence[int]) -> StoredRollout:
    """Return a rollout with one token per word of (role, text). The assistant's words were sampled."""
    words, spans, sampled = [], [], []
    for index, (role, text) in enumerate(texts):
        parts = [f"{word} " for word in text.split(" ")]
        spans.append(MessageSpan(index, len(words), len(words) + len(parts)))
        words += parts
        sampled += [role == "assistant"] * len(parts)
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    mask, count = np.array(sampled), len(words)
    version = np.where(mask, np.array(versions)[np.arange(count) * len(versions) // count], -1)
    logprobs = np.where(mask, -np.abs(np.sin(np.arange(count))) * 3, 0.0)
    sequence = StoredSequence(
        spans=spans,
        token_ids=np.array([ids[word] for word in words], "<i4").tobytes(),
        trained=mask.tobytes(),
        versions=version.astype("<i4").tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        advantages=np.where(mask, np.linspace(-1, 1, count), np.nan).astype("<f4").tobytes(),
    )
    messages = [
        Message(role=role, content=text, sampled=role == "assistant", name="search" if role == "tool" else "")
        for role, text in texts
    ]
    call = ToolCall("c1", "search", '{"query": "capital of France"}')
    messages[2] = msgspec.structs.replace(messages[2], tool_calls=[call], reasoning="The user wants a city.")
    conversation = StoredConversation(agent="", reward=1.0, messages=messages, tools=["search"], sequences=[sequence])
    return StoredRollout([conversation], {i: word for word, i in ids.items()})


def write_rollouts(run: RunDirectory, steps: range = range(1, 4), of_a_step: int = 4) -> None:
    """Write an archive with rollouts of these steps: trained, failed, dropped and truncated ones, all hostile."""
    directory = run.path / rollout_files.DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    texts = [
        ("system", "You answer with one word."),
        ("user", f"What is the capital of France? {HOSTILE} \x1b[31m \u202etxet"),
        ("assistant", "I look it up."),
        ("tool", '{"city": "Paris", "population": 2102650}'),
        ("assistant", "The capital of France is Paris, which has about two million inhabitants."),
    ]
    rollout = stored_rollout(texts, [1, 2, 3])
    for step in steps:
        made = []
        for i in range(of_a_step):
            summary = RolloutSummary(
                id=f"{step:04d}-{i}",
                group=f"group-{step}",
                environment="math" if i % 2 else "code",
                state="failed" if i == 3 else "dropped" if i == 2 else "trained",
                step=step,
                attempt=2,
                reward=None if i == 3 else i / 2,
                reward_parts={"correct": 1.0, "format": 0.1},
                advantage=None if i > 1 else i - 0.5,
                opened_version=step - 1,
                oldest_version=step,
                newest_version=step + 2,
                staleness=1,
                truncated=i == 1,
                error=HOSTILE if i == 3 else "",
                dropped="zero_advantage" if i == 2 else "",
                tokens=40,
                sampled_tokens=16,
                trained_tokens=16,
                turns=2,
                seconds=3.5,
                time=T0 + 20 * step,
                finish_reason="stop",
            )
            made.append((summary, rollout))
        name = FileName(step, 2, "batch", 0)
        (directory / str(name)).write_bytes(b"".join(rollout_files.encode(made)))
