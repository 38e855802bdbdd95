"""The benchmark of routers counts the work that a request waits for."""

from __future__ import annotations

from benchmarks.routing import Served, work_of


def test_work_is_what_the_engine_computed_for_requests_in_flight() -> None:
    first, second, later, elsewhere = served = (
        Served("a", 0.0, 2.0, 600),
        Served("a", 1.0, 4.0, 40),
        Served("a", 3.0, 5.0, 100),
        Served("b", 0.0, 5.0, 700),
    )
    assert [work_of(served, each) for each in (first, second, later, elsewhere)] == [640, 740, 140, 700]
