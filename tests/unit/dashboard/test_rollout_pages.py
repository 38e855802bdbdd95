"""Filters of the list of rollouts."""

from __future__ import annotations

import math

import pytest
from starlette.testclient import TestClient

from primeslurm.dashboard.rollout_pages import NotValidError, query_of
from primeslurm.run.rollouts.query import RolloutQuery


def test_parameters_become_conditions() -> None:
    assert query_of({}) == query_of({"environment": "", "version": "", "failed": ""}) == RolloutQuery()
    found = query_of(
        {
            "first_step": "3",
            "last_step": "7",
            "environment": "math",
            "group": "g",
            "version": "5",
            "min_reward": "-0.5",
            "max_reward": "1",
            "truncated": "true",
            "failed": "false",
            "evaluation": "true",
            "dropped": "false",
        }
    )
    assert found == RolloutQuery((3, 7), "math", "g", 5, -0.5, 1.0, True, False, True, False)
    assert query_of({"first_step": "3"}).steps == (3, 1 << 62) and query_of({"last_step": "3"}).steps == (0, 3)
    assert query_of({"max_reward": "inf"}).max_reward == math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_step", "-1"),
        ("last_step", "1.5"),
        ("version", "³"),
        ("version", "9" * 16),
        ("min_reward", "nan"),
        ("max_reward", "high"),
        ("truncated", "yes"),
        ("offset", "x"),
        ("limit", "all"),
    ],
)
def test_a_wrong_parameter_is_named(client: TestClient, name: str, value: str) -> None:
    if name not in ("offset", "limit"):
        with pytest.raises(NotValidError, match=name):
            query_of({name: value})
    answer = client.get("/api/runs/r/rollouts", params={name: value})
    assert answer.status_code == 400 and answer.json()["error"].startswith(f"{name} = {value[:50]}")


def test_a_run_without_rollouts_has_an_empty_page(client: TestClient) -> None:
    assert client.get("/api/runs/r/rollouts").json() == {"offset": 0, "rollouts": [], "total": 0, "problems": []}
    assert client.get("/api/runs/r/rollouts/none").status_code == 404
