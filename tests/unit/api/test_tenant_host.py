"""Decisions of the tenant host about a tenant, without processes and with its own clock."""

from __future__ import annotations

from typing import Any

from primeslurm.api.tenants.host import BACKOFF_S, MAX_BACKOFF_S, START_S, STOP_S, DiskUse, TenantSupervisor, View


def view(**changes: Any) -> View:
    values: dict[str, Any] = {"wanted": "running", "wanted_since": 1.0}
    return View(**values | changes)


def running(now: float = 0.0) -> TenantSupervisor:
    supervisor = TenantSupervisor()
    assert supervisor.decide(view(), now) == "start"
    assert supervisor.decide(view(active=True, starter="succeeded"), now) == "nothing"
    assert supervisor.state == "running"
    return supervisor


def test_a_wanted_tenant_is_started_once() -> None:
    supervisor = TenantSupervisor()
    assert supervisor.decide(view(), 0) == "start"
    assert supervisor.decide(view(starter="running"), 1) == "nothing"
    assert supervisor.decide(view(starter="succeeded", active=True), 2) == "nothing"
    assert (supervisor.state, supervisor.failures) == ("running", 0)


def test_a_run_that_a_killed_host_left_is_adopted() -> None:
    supervisor = TenantSupervisor()
    assert supervisor.decide(view(active=True), 0) == "nothing"
    assert supervisor.state == "running"


def test_a_run_with_old_addresses_is_stopped_and_resumed() -> None:
    supervisor = TenantSupervisor()
    assert supervisor.decide(view(active=True, current=False), 0) == "stop"
    assert supervisor.decide(view(active=True, current=False), 1) == "nothing"
    assert supervisor.decide(view(), 2) == "start"
    assert supervisor.failures == 0


def test_pause_stops_with_a_checkpoint_and_resume_starts_again() -> None:
    supervisor = running()
    assert supervisor.decide(view(wanted="paused", active=True), 10) == "stop"
    assert supervisor.decide(view(wanted="paused", active=True), 11) == "nothing"
    assert supervisor.decide(view(wanted="paused"), 12) == "nothing"
    assert supervisor.state == "paused"
    assert supervisor.decide(view(wanted_since=2.0), 13) == "start"


def test_a_run_that_does_not_stop_is_ended_without_a_checkpoint() -> None:
    supervisor = running()
    assert supervisor.decide(view(wanted="removed", active=True), 10) == "stop"
    assert supervisor.decide(view(wanted="removed", active=True), 10 + STOP_S) == "nothing"
    assert supervisor.decide(view(wanted="removed", active=True), 11 + STOP_S) == "end"
    assert supervisor.decide(view(wanted="removed", active=True), 12 + STOP_S) == "nothing"
    assert supervisor.decide(view(wanted="removed"), 13 + STOP_S) == "nothing"
    assert supervisor.state == "removed"


def test_failures_without_a_new_checkpoint_double_the_wait() -> None:
    supervisor, now, waits = running(), 0.0, []
    for _ in range(9):
        assert supervisor.decide(view(reason="out of luck"), now) == "nothing"
        assert (supervisor.state, supervisor.reason) == ("back-off", "out of luck")
        failed_at = now
        while supervisor.decide(view(), now) == "nothing":
            now += BACKOFF_S
        waits.append(now - failed_at)
        supervisor.decide(view(active=True, starter="succeeded"), now)
    assert waits[:3] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S]
    assert waits[-1] == MAX_BACKOFF_S


def test_a_new_checkpoint_forgives_earlier_failures() -> None:
    supervisor = running()
    supervisor.decide(view(), 1)
    assert supervisor.decide(view(), 1 + BACKOFF_S) == "start"
    supervisor.decide(view(active=True, committed=5), 20)
    assert (supervisor.failures, supervisor.reason) == (0, "")
    supervisor.decide(view(committed=5), 30)
    assert supervisor.failures == 1


def test_a_command_ends_the_wait_after_a_failure() -> None:
    supervisor = running()
    supervisor.decide(view(), 1)
    assert supervisor.decide(view(), 2) == "nothing"
    assert supervisor.decide(view(wanted_since=9.0), 2) == "start"


def test_a_start_that_fails_is_a_failure_and_one_that_hangs_is_ended() -> None:
    supervisor = TenantSupervisor()
    supervisor.decide(view(), 0)
    assert supervisor.decide(view(starter="running"), START_S + 1) == "end_starter"
    assert supervisor.decide(view(starter="failed", reason="no such environment"), START_S + 2) == "nothing"
    assert (supervisor.state, supervisor.failures, supervisor.reason) == ("back-off", 1, "no such environment")


def test_a_completed_run_is_not_started_again() -> None:
    supervisor = running()
    assert supervisor.decide(view(completed=True), 5) == "nothing"
    assert supervisor.state == "completed"
    assert supervisor.decide(view(completed=True, wanted_since=7.0), 6) == "nothing"


def test_a_tenant_that_is_not_admitted_waits() -> None:
    supervisor = TenantSupervisor()
    assert supervisor.decide(view(), 0, admitted=False) == "nothing"
    assert (supervisor.state, supervisor.reason) == ("waiting", "the deployment is full")
    assert supervisor.decide(view(), 1) == "start"


def test_the_end_of_the_deployment_stops_every_tenant() -> None:
    supervisor = running()
    assert supervisor.decide(view(active=True), 5, ending=True) == "stop"
    assert supervisor.decide(view(), 6, ending=True) == "nothing"
    starting = TenantSupervisor()
    starting.decide(view(), 0)
    assert starting.decide(view(starter="running"), 1, ending=True) == "end_starter"


def test_a_tenant_over_its_disk_quota_is_paused_until_there_is_room() -> None:
    supervisor = running()
    over = DiskUse(1_100_000_000, 1e9)
    assert supervisor.decide(view(active=True, disk=DiskUse(1_000_000_000, 1e9)), 10) == "nothing"
    assert supervisor.decide(view(active=True, disk=over), 11) == "stop", "with a checkpoint"
    assert supervisor.decide(view(disk=over), 12) == "nothing"
    assert (supervisor.state, supervisor.failures) == ("paused", 0)
    assert supervisor.reason.startswith("its files use 1.1 GB of 1 GB (disk_gb); it continues below 950 MB")
    assert supervisor.decide(view(disk=DiskUse(960_000_000, 1e9)), 13) == "nothing", "its first files would exceed it"
    assert supervisor.decide(view(disk=DiskUse(950_000_000, 1e9)), 14) == "start"
    assert supervisor.reason == ""


def test_a_tenant_over_its_disk_quota_continues_when_the_quota_is_raised() -> None:
    supervisor = TenantSupervisor()
    assert supervisor.decide(view(disk=DiskUse(1_100_000_000, 1e9)), 0) == "nothing"
    assert supervisor.state == "paused"
    raised = DiskUse(1_100_000_000, 1.12e9)
    assert supervisor.decide(view(disk=raised), 1) == "nothing"
    assert supervisor.decide(view(disk=raised, wanted_since=2.0), 2) == "start", "after a command"


def test_a_run_is_not_stopped_before_its_disk_use_is_measured() -> None:
    supervisor = TenantSupervisor()
    assert supervisor.decide(view(disk=None), 0) == "nothing"
    assert (supervisor.state, supervisor.reason) == ("waiting", "its disk use is not measured yet")
    assert supervisor.decide(view(disk=None, active=True), 1) == "nothing"
    assert supervisor.state == "running"
