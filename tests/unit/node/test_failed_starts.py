"""Engines that cannot start end the attempt."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from primeslurm.node.agent.supervision import ProcessState, Supervision
from primeslurm.node.head.failed_starts import FailedStarts
from primeslurm.plan.supervision import Health
from primeslurm.records.fleet import Ending, Outcome, ProcessReport
from primeslurm.run.diagnosis.failure_signatures import is_transient
from tests.support.plans import process as of_plan
from tests.support.plans import python
from tests.unit.node.fleet_of_agents import Agents, process
from tests.unit.node.test_agent import Running, start

__all__ = ["start"]  # a fixture
ERROR = "ValueError: max_model_len (131072) is larger than 40960"
NO_MODULE = "ModuleNotFoundError: No module named 'deep_ep'"


def failed(starts: int, error: str = ERROR, state: str = "backoff") -> ProcessReport:
    """Return the report of an engine that has ended this often before it was ready."""
    return ProcessReport(state, exit_code=1, restarts=starts, reason=error, failed_starts=starts, start_error=error)


LOADING = ProcessReport("loading")


def ends(*errors: str, code: int = 1) -> Supervision:
    """Return a process whose starts have ended with these errors."""
    supervision = Supervision(process())
    for error in errors:
        supervision.started(0)
        supervision.reason = error
        supervision.exited(1, code, ending=False)
    return supervision


@pytest.mark.parametrize(
    ("errors", "count"),
    [
        ((ERROR,), 1),
        ((ERROR, ERROR.replace("131072", "131073")), 2),
        ((ERROR, NO_MODULE), 1),
        ((ERROR, ERROR, ""), 0),
        (("", ""), 0),
    ],
)
def test_starts_with_the_same_error_are_counted(errors: tuple[str, ...], count: int) -> None:
    supervision = ends(*errors)
    assert (supervision.failed_starts, supervision.start_error) == (count, errors[-1])


def test_only_own_errors_before_readiness_count() -> None:
    assert ends("not ready within 60 s", code=-9).failed_starts == 0
    supervision = ends(ERROR)
    supervision.started(2)
    supervision.renew("moved")
    supervision.exited(3, 1, ending=False)
    assert supervision.failed_starts == 1, "it was ended on purpose, which does not count"
    supervision.started(4)
    supervision.tick(5, prerequisites=True, ready=True)
    supervision.reason = ERROR
    supervision.exited(6, 1, ending=False)
    assert (supervision.failed_starts, supervision.start_error) == (0, "")


def test_an_attempt_ends_when_all_engines_of_a_role_fail_alike_and_one_of_them_twice() -> None:
    names = ("decode-0", "decode-1")
    agents = Agents(*((process("decode", name=name, node=i),) for i, name in enumerate(names)))
    agents.states = dict.fromkeys(names, LOADING)
    agents.assigned()
    agents.states["decode-0"] = failed(2)
    assert agents.decide(1.0) is None, "the other engine may still become ready"
    agents.states["decode-1"] = failed(1)
    ending = agents.decide(2.0)
    assert ending == Ending(
        Outcome.FAILED,
        "decode-0 cannot start: 2 starts in a row ended with the same error, and no process of role decode has been "
        f"ready: {ERROR}",
        "decode-0",
        error=ERROR,
    )


def test_a_role_that_has_served_is_restarted() -> None:
    agents = Agents((process(name="a"), process(name="b")))
    agents.states = {"a": LOADING}
    agents.assigned()
    assert agents.decide(0.5) is None, "b is ready"
    agents.states = {"a": failed(2), "b": failed(2)}
    assert agents.decide(1.0) is None


@pytest.mark.parametrize(
    ("reports", "dead"),
    [
        ({"a": failed(2), "b": failed(1)}, True),
        ({"a": failed(1), "b": failed(1)}, False),
        ({"a": failed(2), "b": failed(2, NO_MODULE)}, False),
        ({"a": failed(2), "b": None}, False),
        (
            {"a": failed(2, "OSError: [Errno 98] Address already in use"), "b": failed(2, "Address already in use")},
            False,
        ),
        ({"a": failed(2), "lost": failed(1)}, True),
    ],
)
def test_all_engines_must_fail_alike(reports: dict[str, ProcessReport | None], dead: bool) -> None:
    starts = FailedStarts([process(name=name) for name in reports])
    assert (starts.check(reports.get, {"lost"}) is not None) is dead


def test_a_restart_group_counts_as_one_engine() -> None:
    starts = FailedStarts([process(name="a", unit="u"), process(name="b", unit="u")])
    reports = {"a": failed(2, state="fallen"), "b": failed(2, "DistStoreError: wait timeout", state="fallen")}
    assert starts.check(reports.get, set()) is not None, "the other engine only waited for this one"


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        ("RuntimeError: CUDA error: unknown error", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", False),
        ("torch.OutOfMemoryError: CUDA out of memory. ProbeReport to allocate 2 GiB", False),
        ("ValueError: Free memory on device cuda:0 (2/80 GiB) is less than desired GPU memory utilization", True),
        ("OSError: [Errno 98] Address already in use", True),
        ("ConnectionError: Connection refused", True),
        ("requests.exceptions.ConnectionError: Max retries exceeded with url: /api/models/m", True),
        ("TimeoutError: Timed out waiting for engine core processes to start.", True),
        ("ValueError: No available memory for the cache blocks.", False),
        (NO_MODULE, False),
        (ERROR, False),
    ],
)
def test_transient_errors(error: str, transient: bool) -> None:
    assert is_transient(error) is transient


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('no such dtype')", "ValueError: no such dtype"),
        (
            "import argparse; argparse.ArgumentParser('serve').parse_args()",
            "serve: error: unrecognized arguments: --quick",
        ),
    ],
)
def test_an_engine_that_cannot_start_again_ends_the_run(start: Callable[..., Running], code: str, error: str) -> None:
    health = Health(port="http", path="/x")
    running = start((of_plan("engine-0", 0, python(code, "--quick"), ports={"http": 21000}, health=health),))
    running.join()
    assert running.head.ending is not None
    assert running.head.ending.error == error
    assert re.match(r"engine-0 cannot start: \d starts in a row", running.head.ending.reason)
    assert running.report("engine-0").state in (ProcessState.BACKOFF, ProcessState.STOPPED)
