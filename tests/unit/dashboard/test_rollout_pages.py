"""Filters of the list of rollouts."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from primeslurm.dashboard.rollout_pages import NotValidError, query_of
from primeslurm.run.rollouts.query import RolloutQuery
from tests.support.recorded_runs import HOSTILE


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
    assert query_of({"first_step": "3"}).steps == (3, sys.maxsize) and query_of({"last_step": "3"}).steps == (0, 3)
    assert query_of({"max_reward": "inf"}).max_reward == math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_step", "-1"),
        ("last_step", "1.5"),
        ("version", "³"),
        ("min_reward", "nan"),
        ("max_reward", "high"),
        ("version", "null"),
        ("truncated", "null"),
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
    assert answer.status_code == 400 and name in answer.json()["error"]


def test_a_run_without_rollouts_has_an_empty_page(client: TestClient) -> None:
    assert client.get("/api/runs/s/rollouts").json() == {"rollouts": [], "total": 0, "problems": []}
    assert client.get("/api/runs/s/rollouts/none").status_code == 404


def test_rollouts_are_listed_filtered_and_paged(client: TestClient) -> None:
    page = client.get("/api/runs/r/rollouts", params={"limit": 5}).json()
    assert page["total"] == 12 and [each["step"] for each in page["rollouts"]] == [3, 3, 3, 3, 2]
    page = client.get("/api/runs/r/rollouts", params={"offset": 10}).json()
    assert page["total"] == 12 and len(page["rollouts"]) == 2
    parameters = {"first_step": 2, "last_step": 2, "failed": "true"}
    (failed,) = client.get("/api/runs/r/rollouts", params=parameters).json()["rollouts"]
    assert (failed["id"], failed["error"]) == ("0002-3", HOSTILE)
    oldest = client.get("/api/runs/r/rollouts", params={"order": "oldest"}).json()["rollouts"]
    assert oldest[0]["step"] == 1


def test_a_transcript_has_messages_and_tokens(client: TestClient) -> None:
    transcript = client.get("/api/runs/r/rollouts/0002-1").json()
    (conversation,) = transcript["conversations"]
    assert [message["role"] for message in conversation["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    (sequence,) = conversation["sequences"]
    last = sequence["spans"][-1]
    text = "".join(sequence["pieces"][last["start"] : last["end"]])
    assert text.strip() == conversation["messages"][-1]["content"]
    assert sequence["versions"][last["start"]] in (1, 2, 3) and sequence["versions"][0] is None


def test_a_damaged_file_of_the_archive_is_named(client: TestClient, runs: Path) -> None:
    (file,) = (runs / "r").rglob("00000002-*")
    file.write_bytes(b"damaged")
    page = client.get("/api/runs/r/rollouts").json()
    assert page["total"] == 8 and len(page["problems"]) == 1 and file.name in page["problems"][0]
