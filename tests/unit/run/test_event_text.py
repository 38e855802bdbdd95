"""Texts of events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from primeslurm.records.events import decode
from primeslurm.records.record import Event
from primeslurm.run.status.event_text import exit_text, newest_texts, notable


def read(*events: dict[str, Any]) -> list[Event]:
    """Return the events as a reader of journals gets them."""
    lines = (json.dumps({"time": i + 1.0, "process": "head", **event}).encode() for i, event in enumerate(events))
    return [event for line in lines if (event := decode(line)) is not None]


def texts(*events: dict[str, Any]) -> list[tuple[str, str, str]]:
    notable_texts = notable(read(*events))
    return [(each.who, each.text, each.level) for each in notable_texts]


CHECKS = [
    {"name": "gpus", "level": "ok", "text": "fine"},
    {"name": "ecc", "level": "failed", "text": "GPU 3 has 2 ECC errors"},
]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            {"kind": "port_taken", "name": "router-0", "port": 8000, "instead": 12345},
            ("router-0", "port 8000 is taken by another user; it uses 12345", "warning"),
        ),
        (
            {"kind": "exited", "name": "router-0", "code": -9, "state": "backoff"},
            ("router-0", "was ended by SIGKILL; it is restarted", "warning"),
        ),
        (
            {"kind": "exited", "name": "decode-r0-0", "code": 1, "state": "fallen", "reason": "hangs"},
            ("decode-r0-0", "ended with exit code 1: hangs; its restart group is restarted", "warning"),
        ),
        (
            {"kind": "exited", "name": "trainer-rank-0", "code": 1, "state": "failed"},
            ("trainer-rank-0", "ended with exit code 1", "error"),
        ),
        (
            {"kind": "step_skipped", "process": "trainer-rank-0", "step": 7, "grad_norm": "nan"},
            ("trainer-rank-0", "step 7 was skipped: its gradient norm is nan", "warning"),
        ),
        ({"kind": "started", "name": "router-0", "restarts": 2}, ("router-0", "restarted (restart 2)", "info")),
        (
            {"kind": "router_incomplete", "process": "router-0", "serves": 0, "planned": 2, "missing": ["http://a:1"]},
            ("router-0", "served 0 of 2 engines; its list of engines is corrected", "warning"),
        ),
        (
            {"kind": "router_incomplete", "process": "router-0", "serves": 2, "planned": 2, "foreign": ["http://b:1"]},
            (
                "router-0",
                "served 2 of 2 engines, and 1 engines of another run; its list of engines is corrected",
                "warning",
            ),
        ),
        (
            {"kind": "router_complete", "process": "router-0", "planned": 2, "seconds": 1.6},
            ("router-0", "serves all 2 engines again after 1.6 s", "info"),
        ),
        (
            {"kind": "router_restarted", "process": "router-0", "reason": "why"},
            ("router-0", "is restarted: why", "warning"),
        ),
        (
            {"kind": "seated", "nodes": ["a", "b"], "spares": ["c"]},
            ("head", "all 2 nodes are ready, and 1 more as spares", "info"),
        ),
        ({"kind": "node_lost", "node": "n1", "reason": "ECC"}, ("node n1", "is lost: ECC", "warning")),
        (
            {"kind": "launched_again", "process": "batch", "without": ["n1", "n2"]},
            ("batch", "starts all agents again without n1, n2", "warning"),
        ),
        (
            {"kind": "ending", "process": "batch", "outcome": "failed", "reason": "why"},
            ("batch", "ends the attempt as failed: why", "error"),
        ),
        ({"kind": "node_replaced", "node": "n1", "by": "n2"}, ("node n1", "is replaced by n2", "info")),
        (
            {"kind": "given_up", "processes": list("abcde"), "reason": "node n1: ECC"},
            ("head", "continues without a, b, c and 2 more: node n1: ECC", "error"),
        ),
        (
            {"kind": "preflight", "node": "n1", "fitness": "unfit", "checks": CHECKS},
            ("node n1", "failed its preflight: GPU 3 has 2 ECC errors", "error"),
        ),
        (
            {"kind": "gpu_failed", "node": "n1", "checks": CHECKS},
            ("node n1", "a GPU failed: GPU 3 has 2 ECC errors", "error"),
        ),
        (
            {"kind": "unit_restart", "unit": "decode-r0", "reason": "x died"},
            ("decode-r0", "is restarted as a group: x died", "warning"),
        ),
        ({"kind": "stall", "suspect": "trainer"}, ("trainer", "no progress; this process is the suspect", "error")),
        (
            {"kind": "ending", "outcome": "failed", "reason": "why"},
            ("head", "ends the attempt as failed: why", "error"),
        ),
        ({"kind": "ended", "outcome": "failed", "why_not": "no"}, ("head", "attempt failed, not requeued: no", "info")),
        (
            {
                "kind": "ranks_wait",
                "behind": ["t0", "t1"],
                "waiting": 0,
                "phase": "publish",
                "step": 5,
                "seconds": 25.0,
            },
            (
                "t0, t1",
                "no heartbeat for 25 s in phase publish of step 5: all ranks wait in the same collective",
                "warning",
            ),
        ),
        (
            {"kind": "ranks_wait", "behind": ["t0"], "waiting": 3, "phase": "publish", "step": 5, "seconds": 25.0},
            ("t0", "no heartbeat for 25 s in phase publish of step 5: 3 ranks wait for it in a collective", "warning"),
        ),
        (
            {"kind": "ranks_wait", "behind": ["t0"], "waiting": 0, "phase": "publish", "step": 5, "seconds": 25.0},
            ("t0", "no heartbeat for 25 s in phase publish of step 5: it takes unusually long", "warning"),
        ),
        ({"kind": "committed", "process": "trainer-rank-0", "step": 5}, ("trainer", "committed step 5", "info")),
        (
            {"kind": "evaluation_done", "step": 5, "rewards": {"held-out": 0.5}, "failed": 0},
            ("evaluation", "step 5: held-out 0.500", "info"),
        ),
        (
            {"kind": "evaluation_done", "step": 5, "rewards": {"a": 0.5, "b": 0.25}, "failed": 3},
            ("evaluation", "step 5: a 0.500, b 0.250; 3 samples failed", "warning"),
        ),
        (
            {"kind": "evaluation_skipped", "step": 5, "why": "late"},
            ("evaluation", "step 5 was skipped: late", "warning"),
        ),
        (
            {"kind": "evaluation_sample_failed", "job": "j", "error": "no tool"},
            ("evaluation", "a rollout failed: no tool", "warning"),
        ),
        (
            {"kind": "engine_state", "engine": "decode-r0-0", "state": "DOWN", "reason": "no answer"},
            ("decode-r0-0", "is down: no answer", "warning"),
        ),
        (
            {"kind": "loop_stood_still", "process": "main", "seconds": 12.4},
            ("main", "was blocked for 12 s: its node is overloaded; engines are not blamed for it", "warning"),
        ),
        (
            {"kind": "continued", "process": "agent-1", "name": "store-1", "seconds": 12.4},
            ("store-1", "was stopped by a signal for 12 s, and was continued", "warning"),
        ),
        (
            {"kind": "file_system_fault", "what": "it is full"},
            ("file system", "the run waits: it is full", "error"),
        ),
        ({"kind": "file_system_fault"}, ("file system", "has free space again", "info")),
    ],
)
def test_eachof_a_notable_event(event: dict[str, Any], words: tuple[str, str, str]) -> None:
    assert texts(event) == [words]


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "exited", "name": "x", "code": -15, "state": "stopped"},
        {"kind": "started", "name": "x", "restarts": 0},
        {"kind": "seated", "process": "agent-1", "node": "n1"},
        {"kind": "ending", "process": "agent-1", "outcome": "failed", "reason": "why"},
        {"kind": "committed", "process": "trainer-rank-3", "step": 5},
        {"kind": "preflight", "node": "n1", "fitness": "fit", "checks": []},
        {"kind": "policy_current", "version": 3},
        {},
    ],
)
def test_other_events_have_no_text(event: dict[str, Any]) -> None:
    assert texts(event) == []


def test_repeated_texts_are_counted() -> None:
    failed = {"kind": "rollout_failed", "process": "orchestrator", "error": "no answer"}
    assert texts(failed, failed, failed) == [("orchestrator", "a rollout failed: no answer (3 times)", "warning")]


def test_newest_texts_are_unique() -> None:
    failed = {"kind": "rollout_failed", "process": "orchestrator", "error": "no answer", "time": 1.0}
    commits = [{"kind": "committed", "process": "trainer-rank-0", "step": i, "time": 1.0 + i} for i in range(1, 5)]
    events = [failed, commits[0], failed | {"time": 2.5}, *commits[1:]]
    notable_texts = newest_texts(notable(read(*events)), 4)
    assert [(each.who, each.time) for each in notable_texts] == [
        ("orchestrator", 2.5),
        ("trainer", 3.0),
        ("trainer", 4.0),
        ("trainer", 5.0),
    ]


def test_exit_codes_and_signals_are_described() -> None:
    assert exit_text(None) == "ended" and exit_text(3) == "ended with exit code 3"
    assert exit_text(-6) == "was ended by SIGABRT" and exit_text(-99) == "was ended by signal 99"
