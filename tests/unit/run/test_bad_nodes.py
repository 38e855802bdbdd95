"""The ledger of bad nodes, and the verb `nodes`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from primeslurm.node.attempt.attempt_end import nodes_to_avoid, record_bad_node
from primeslurm.records.journal import Journal
from primeslurm.run.bad_nodes import BadNodeLedger, exclude_bad_nodes
from primeslurm.run.directory import RunDirectory
from tests.support.cli import primeslurm
from tests.support.plans import plan_of
from tests.support.strangers import attempted, needs_second_user, public_directory


def test_entries_expire_and_the_newest_of_a_node_counts(tmp_path: Path) -> None:
    ledger = BadNodeLedger(tmp_path)
    assert ledger.entries(0.0) == []
    ledger.record("n1", "old", "a", 1, now=0.0, hours=24)
    ledger.record("n1", "ECC errors", "b", 1, now=3600.0, hours=24)
    ledger.record("n2", "silent", "a", 2, now=7200.0, hours=1)
    assert [(e.node, e.reason) for e in ledger.entries(7300.0)] == [("n2", "silent"), ("n1", "ECC errors")]
    assert [(e.node, e.reason) for e in ledger.entries(80000.0)] == [("n1", "ECC errors")]
    assert ledger.entries(100000.0) == []


def test_entry_of_a_node_with_a_fast_clock_expires_like_others(tmp_path: Path) -> None:
    ledger, now, day = BadNodeLedger(tmp_path), time.time(), 86400.0
    ledger.record("n1", "silent", "a", 1, now=now + 3 * day, hours=24)
    (entry,) = ledger.entries(now + 1.0)
    assert entry.time <= now + 1.0 and entry.expires - entry.time == day
    assert [each.node for each in ledger.entries(now + 0.9 * day)] == ["n1"]
    assert ledger.entries(now + 1.1 * day) == []
    plan = exclude_bad_nodes(plan_of(tmp_path / "run", ()), [entry], entry.time - 5 * day)
    assert "0 s ago" in plan.findings[0].text, "never in the future"


def test_damaged_entry_is_skipped(tmp_path: Path) -> None:
    ledger = BadNodeLedger(tmp_path)
    ledger.record("n1", "x", "a", 1, now=0.0, hours=1)
    (tmp_path / ".bad-nodes" / "n2.a.1.json").write_text('{"node": ')
    assert [entry.node for entry in ledger.entries(1.0)] == ["n1"]


def test_plan_excludes_bad_nodes(tmp_path: Path) -> None:
    ledger = BadNodeLedger(tmp_path)
    ledger.record("n1", "2 uncorrected ECC errors", "a", 1, now=0.0, hours=24)
    plan = plan_of(tmp_path / "run", ())
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"exclude": "x[1-3]"})})
    excluding = exclude_bad_nodes(plan, ledger.entries(10800.0), 10800.0)
    assert excluding.job.excluded == "x[1-3],n1"
    assert excluding.findings[0].text == "n1 is avoided: 2 uncorrected ECC errors (run a, 3 h ago)"
    again = exclude_bad_nodes(excluding, [], 10800.0)
    assert (again.job.excluded, again.findings) == ("x[1-3]", ())


def test_agents_record_only_nodes_of_slurm(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", ())
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    journal = Journal(attempt.path, "head")
    record_bad_node(plan, attempt, "local-1", "silent", journal)
    partitions = {"p": {"n1": True, "n2": True}}
    assert nodes_to_avoid(plan, partitions) == []
    record_bad_node(plan.model_copy(update={"executor": "slurm"}), attempt, "n1", "silent", journal)
    assert [entry.node for entry in nodes_to_avoid(plan, partitions)] == ["n1"]


def test_nodes_are_listed_and_forgotten(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    nothing = primeslurm("nodes", "--runs", runs, cwd=tmp_path)
    assert (nothing.code, nothing.out) == (0, "") and "new jobs avoid no nodes" in nothing.err
    now = time.time()
    for node in ("gpu-01", "gpu-02"):
        BadNodeLedger(runs).record(node, "silent", "demo", 2, now=now, hours=24)
    listed = primeslurm("nodes", "--runs", runs, "--json", cwd=tmp_path)
    assert {entry["node"] for entry in json.loads(listed.out)} == {"gpu-01", "gpu-02"}
    wrong = primeslurm("nodes", "--runs", runs, "--forget", "gpu-03", cwd=tmp_path)
    assert wrong.code == 2
    assert "--forget = gpu-03: is not in the ledger of bad nodes (did you mean gpu-0" in wrong.err
    done = primeslurm("nodes", "--runs", runs, "--forget", "gpu-01", cwd=tmp_path)
    assert done.code == 0 and "gpu-02" in done.out and "gpu-01" not in done.out


@pytest.mark.parametrize(
    ("hostlists", "remaining"),
    [
        (["n[1-2]"], ["n3", "x1"]),
        (["n[2-9],x1"], ["n1"]),
        (["n1", "n[2-3]"], ["x1"]),
        (["--all"], []),
    ],
)
def test_host_lists_and_all_nodes_can_be_forgotten(tmp_path: Path, hostlists: list[str], remaining: list[str]) -> None:
    for node in ("n1", "n2", "n3", "x1"):
        BadNodeLedger(tmp_path).record(node, "silent", "demo", 2, now=time.time(), hours=24)
    words = [word for hostlist in hostlists for word in ("--forget", hostlist)]
    result = primeslurm("nodes", "--runs", tmp_path, *words, "--json", cwd=tmp_path)
    assert (result.code, sorted(entry["node"] for entry in json.loads(result.out))) == (0, remaining)


def test_no_node_is_forgotten_if_one_host_list_is_wrong(tmp_path: Path) -> None:
    BadNodeLedger(tmp_path).record("n1", "silent", "demo", 2, now=time.time(), hours=24)
    words = ("--forget", "n1", "--forget", "m[1-2]", "--forget", "n[3-1]")
    result = primeslurm("nodes", "--runs", tmp_path, *words, cwd=tmp_path)
    assert result.code == 2
    assert "--forget = m[1-2]: is not in the ledger" in result.err and "runs backwards" in result.err
    assert [entry.node for entry in BadNodeLedger(tmp_path).entries(time.time())] == ["n1"]


@needs_second_user
def test_entries_of_other_users_do_not_count() -> None:
    def attack() -> None:
        (runs / ".bad-nodes").mkdir()
        (runs / ".bad-nodes").chmod(0o777)
        BadNodeLedger(runs).record("n1", "x", "a", 1, now=0.0, hours=1)
        os.mkfifo(runs / ".bad-nodes" / "n2.a.1.json")
        (runs / ".bad-nodes" / "n3.a.1.json").symlink_to(runs / ".bad-nodes" / "n1.a.1.json")

    with public_directory() as runs:
        assert attempted(attack).succeeded
        assert BadNodeLedger(runs).entries(1.0) == []
        BadNodeLedger(runs).record("n4", "x", "a", 1, now=0.0, hours=1)
        assert [entry.node for entry in BadNodeLedger(runs).entries(1.0)] == ["n4"]
