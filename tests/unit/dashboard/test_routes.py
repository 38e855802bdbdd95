"""The JSON about runs, of healthy runs and of hostile ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from primeslurm.base.files import write_json
from primeslurm.dashboard.charts import OTHER
from primeslurm.dashboard.log_page import PAGE_BYTES
from primeslurm.dashboard.report import report
from primeslurm.dashboard.run_data import RunIndex
from primeslurm.dashboard.text import MAX_LINE
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.liveness import RECHECK_S
from tests.support.clock import Clock
from tests.support.recorded_runs import HOSTILE, T0, recorded_run, write_metrics, write_rollouts


def get(client: TestClient, path: str, **params: str | int) -> Any:
    answer = client.get(f"/api/{path}", params=params)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_all_runs_are_listed_newest_first(client: TestClient, runs: Path) -> None:
    write_json(runs / "s" / "lock.json", {"run_id": "s-1", "created_at": T0 + 1})
    (runs / "no-run").mkdir()
    (runs / "file").write_text("")
    answer = get(client, "runs")
    assert answer["directory"] == str(runs)
    assert [(run["run"], run["phase"], run["step"], run["health"]) for run in answer["runs"]] == [
        ("s", "failed", 20, "error"),
        ("r", "completed", 30, "ok"),
    ]
    assert answer["runs"][0]["problem"] == HOSTILE
    assert answer["runs"][1]["reward"] == pytest.approx(0.9, abs=0.1) and answer["runs"][1]["max_steps"] == 30


def test_a_damaged_run_hides_no_other(client: TestClient, runs: Path) -> None:
    recorded_run(runs / "d")
    (runs / "d" / "attempts" / "2" / "end.json").unlink()
    (runs / "d" / "attempts" / "2" / "fleet.json").write_text('{"time": "yesterday"}')
    found = {run["run"]: run["phase"] for run in get(client, "runs")["runs"]}
    assert found == {"r": "completed", "s": "failed", "d": "damaged"}
    assert client.get("/api/runs/d/status").status_code == 404


def test_a_status_says_what_the_terminal_says(client: TestClient) -> None:
    status = get(client, "runs/r/status")
    assert (status["phase"], status["attempt"], status["max_steps"]) == ("completed", 2, 30)
    assert status["metrics"]["step"] == 30 and status["invalid"] == []


def test_curves_are_grouped_and_no_metric_is_left_out(client: TestClient) -> None:
    answer = get(client, "runs/r/curves")
    assert answer["rows"] == 30
    charts = {chart["title"]: chart for chart in answer["charts"]}
    assert [line["label"] for line in charts["Reward per environment"]["lines"]] == ["code", "math"]
    assert [line["label"] for line in charts["KV cache in use"]["lines"]] == ["prefill", "decode"]
    assert charts["KL"]["log"] and charts["Parts of a step"]["stacked"]
    assert charts["Entropy"]["steps"] == list(range(1, 31))
    assert charts["Entropy"]["times"][:2] == [T0 + 20, T0 + 40]
    assert charts["held-out"]["evaluation"] and charts["held-out"]["steps"] == [0, 10, 20]
    assert charts["held-out"]["values"] == [[0.25, 0.75, 0.5], [0.25, 0.75, 0.5]]
    others = get(client, "runs/r/curves", other=1)["charts"]
    assert len(others) == answer["other"] and {chart["section"] for chart in others} == {OTHER}
    assert {"unheard/of", "eval/held-out/failed"} <= {chart["title"] for chart in others}


def test_a_value_that_is_not_finite_is_missing(client: TestClient, runs: Path) -> None:
    row = {"step": 31, "time": T0, "trainer/loss": float("nan"), "trainer/entropy": float("inf"), "reward/mean": 1.0}
    with (runs / "r" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    charts = {chart["title"]: chart for chart in get(client, "runs/r/curves")["charts"]}
    assert charts["Reward"]["steps"][-1] == 31 and charts["Entropy"]["steps"][-1] == 30


def test_the_fleet_has_nodes_with_their_processes(client: TestClient) -> None:
    fleet = get(client, "runs/r/fleet")
    names = {node["name"]: [process["name"] for process in node["processes"]] for node in fleet["nodes"]}
    assert names == {"n001": ["orchestrator", "router-0", "prefill-r0-0"], "n002": ["trainer-rank-0", "decode-r0-0"]}
    assert fleet["replicas"][0]["engines"] == 2


def test_events_belong_to_attempts(client: TestClient) -> None:
    first, second = get(client, "runs/r/events")
    assert (first["number"], first["outcome"], first["reason"]) == (1, "failed", HOSTILE)
    assert first["begin"] == T0 and first["end"] == T0 + 3600
    assert any(HOSTILE in event["text"] for event in second["events"])


def test_logs_are_listed_and_read_in_pages(client: TestClient, runs: Path) -> None:
    (runs / "r" / "slurm-8.out").write_text("srun: ok\n")
    answer = get(client, "runs/r/logs")
    assert (answer["attempt"], answer["attempts"]) == (2, [1, 2])
    assert [log["name"] for log in answer["logs"]][:2] == ["job", "decode/decode-r0-0"]
    assert get(client, "runs/r/log", name="job")["lines"] == ["srun: ok"]
    log = runs / "r" / "attempts" / "2" / "logs" / "trainer" / "trainer-rank-0.log"
    log.write_text("".join(f"{i:09d}\n" for i in range(PAGE_BYTES // 5)) + "incompl")
    page = get(client, "runs/r/log", name="trainer/trainer-rank-0", attempt=2)
    assert page["partial"] == "incompl" and page["end"] == log.stat().st_size - 7
    read = page["lines"]
    while page["begin"]:
        page = get(client, "runs/r/log", name="trainer/trainer-rank-0", before=page["begin"])
        read = page["lines"] + read
    assert read == [f"{i:09d}" for i in range(PAGE_BYTES // 5)]


def test_plan_recipe_and_differences(client: TestClient) -> None:
    plan = get(client, "runs/r/plan")
    assert [node["index"] for node in plan["nodes"]] == [0, 1] and plan["lock"]["packages"] == {"vllm": "0.32"}
    assert "argv" not in plan["nodes"][0]["processes"][0]
    assert get(client, "runs/r/processes/orchestrator")["argv"][-1] == "pass"
    recipe = get(client, "runs/r/recipe")
    assert HOSTILE in recipe["written"] and recipe["resolved"]["max_steps"] == 30
    assert get(client, "runs/r/diff/s") == []


def test_a_difference_names_fields(client: TestClient, runs: Path) -> None:
    write_json(runs / "s" / "recipe.resolved.json", {"max_steps": 60, "orchestrator": {"batch_size": 8}})
    fields = {change["field"]: (change["a"], change["b"]) for change in get(client, "runs/r/diff/s")}
    assert fields["max_steps"] == ("30", "60")


def test_evaluations_have_their_samples(client: TestClient) -> None:
    answer = get(client, "runs/r/evaluations")
    assert [record["step"] for record in answer["evaluations"]] == [0, 10, 20]
    assert answer["best"] == {"step": 10, "metric": "held-out/pass@4", "value": 0.75}
    examples = get(client, "runs/r/evaluations/20/held-out")
    assert len(examples) == 16 and examples[0]["samples"][1]["error"] == HOSTILE
    assert client.get("/api/runs/r/evaluations/10/held-out").status_code == 404


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("runs/none/status", 404),
        ("runs/../status", 404),
        ("runs/..%2f..%2fetc/status", 404),
        ("runs/%2e%2e/status", 404),
        ("runs/r/log?name=../../../../lock", 404),
        ("runs/r/log?name=/etc/passwd", 404),
        ("runs/r/log?name=trainer/trainer-rank-0&before=-1", 400),
        ("runs/r/log?name=trainer/trainer-rank-0&before=1e9", 400),
        ("runs/r/logs?attempt=99", 404),
        ("runs/r/logs?attempt=x", 400),
        ("runs/r/curves?points=nan", 400),
        ("runs/r/processes/none", 404),
        ("runs/r/diff/none", 404),
        ("runs/r/evaluations/20/..%2f..%2flock", 404),
        ("runs/r/evaluations/99999999999999999999/x", 400),
        ("runs/r/evaluations/" + "9" * 5000 + "/x", 400),
    ],
)
def test_a_wrong_address_is_an_error_and_reads_nothing(client: TestClient, path: str, code: int) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == code, answer.text


def test_hidden_files_next_to_runs_are_out_of_reach(client: TestClient, runs: Path) -> None:
    recorded_run(runs.parent / "outside")
    (runs / ".hidden").symlink_to(runs.parent / "outside")
    assert [run["run"] for run in get(client, "runs")["runs"]] == ["r", "s"]
    assert client.get("/api/runs/.hidden/status").status_code == 404


def test_hostile_logs_are_cleaned_and_bounded(client: TestClient, runs: Path) -> None:
    log = runs / "r" / "attempts" / "2" / "logs" / "trainer" / "trainer-rank-0.log"
    lines = [
        b"\x1b[31mred\x1b[0m \x1b]0;title\x07done\x1b[2J",
        HOSTILE.encode(),
        bytes(range(256)).replace(b"\n", b""),
        "\u202eright to left\u2066".encode(),
        b"x" * (10 << 20),
        b"after",
    ]
    log.write_bytes(b"\n".join(lines) + b"\n")
    shown = []
    page = get(client, "runs/r/log", name="trainer/trainer-rank-0")
    assert page["lines"][-1] == "after" and len(json.dumps(page)) < 3 * PAGE_BYTES
    pages = 0
    while page["begin"] and pages < 100:
        page = get(client, "runs/r/log", name="trainer/trainer-rank-0", before=page["begin"])
        shown, pages = page["lines"] + shown, pages + 1
    assert shown[0] == "red done" and shown[1] == HOSTILE and "right to left" in shown[3]
    assert all(ord(char) >= 32 or char == "\t" for line in shown for char in line)
    assert all(len(line) < MAX_LINE + 50 for line in shown)


def test_a_run_without_metrics_has_all_pages(client: TestClient, runs: Path) -> None:
    run = recorded_run(runs / "n", 0, outcome="")
    (run.path / "metrics.jsonl").unlink()
    for path in ("status", "curves", "fleet", "events", "logs", "plan", "recipe", "evaluations"):
        get(client, f"runs/n/{path}")
    assert get(client, "runs/n/curves")["charts"] == []


def test_a_removed_run_is_gone_and_a_new_one_appears(client: TestClient, runs: Path, clock: Clock) -> None:
    assert len(get(client, "runs")["runs"]) == 2
    recorded_run(runs / "t")
    assert len(get(client, "runs")["runs"]) == 2, "the list is a few seconds old"
    assert get(client, "runs/t/status")["run"] == "t", "but a run can be opened at once"
    clock.now += 60
    assert {run["run"] for run in get(client, "runs")["runs"]} == {"r", "s", "t"}


def test_reading_writes_nothing(client: TestClient, runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for path in ("status", "curves", "fleet", "events", "logs", "plan", "recipe", "evaluations", "diff/s"):
        get(client, f"runs/r/{path}")
    get(client, "runs")
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_an_ended_run_is_read_once(client: TestClient, index: RunIndex, runs: Path, clock: Clock) -> None:
    first = {run.run: run for run in index.overviews()}
    clock.now += 60
    again = {run.run: run for run in index.overviews()}
    assert again["r"] is first["r"]
    write_metrics(index.run("r").run, range(31, 32), "a")
    clock.now += 60
    assert {run.run: run.step for run in index.overviews()}["r"] == 31


def test_a_head_that_was_seen_to_write_is_watched_if_its_clock_differs(
    index: RunIndex, runs: Path, clock: Clock
) -> None:
    run = recorded_run(runs / "live", outcome="")
    data = index.run("live")
    attempt = run.attempt(2)
    assert data._recheck_s(attempt) == 0.0, "a dead run must not delay the list"
    fleet = run.latest().fleet_file
    write_json(fleet, json.loads(fleet.read_bytes()))
    assert data._recheck_s(attempt) == RECHECK_S
    clock.now += 1000
    assert data._recheck_s(attempt) == 0.0


def test_names_and_texts_that_are_not_unicode_are_shown(client: TestClient, runs: Path) -> None:
    run = RunDirectory(recorded_run(runs / "bad").path.rename(os.fsdecode(os.fsencode(runs) + b"/bad\xff")))
    event = '{"time": 1.0, "process": "agent-0", "kind": "start_failed", "name": "p", "error": "half \\ud800"}\n'
    with (run.attempt(2).path / "events" / "head.jsonl").open("a") as file:
        file.write(event)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "time": 1.0, "\\udfff": 1, "trainer/loss": NaN}\n')
    (run.attempt(2).path / "logs" / "trainer" / os.fsdecode(b"\xfe.log")).write_text("log\n")
    assert "bad?" in [each["run"] for each in get(client, "runs")["runs"]]
    for path in ("status", "curves", "fleet", "events", "logs", "plan", "recipe", "evaluations"):
        get(client, f"runs/bad%3F/{path}")
    assert "half ?" in get(client, "runs/bad%3F/events")[1]["events"][0]["text"]
    assert len(get(client, "runs/bad%3F/curves", other=1)["charts"]) > 0
    assert report(run, lambda job: None, T0).startswith("<!doctype html>")


@pytest.mark.parametrize("nodes", [None, {"x": 1}, [None], [{"processes": None}], [{"processes": [1]}]])
def test_a_plan_of_another_form_is_damage(client: TestClient, runs: Path, nodes: Any) -> None:
    write_json(runs / "r" / "attempts" / "2" / "plan.json", {"nodes": nodes})
    for path in ("plan", "processes/orchestrator"):
        answer = client.get(f"/api/runs/r/{path}")
        assert answer.status_code == 404 and "r is damaged" in answer.json()["error"]


@pytest.mark.parametrize("listed", [True, False])
def test_a_run_that_was_made_anew_shows_nothing_of_the_old_one(
    client: TestClient, runs: Path, clock: Clock, listed: bool
) -> None:
    old = get(client, "runs/r/rollouts")
    assert old["total"] == 12 and get(client, "runs/r/status")["phase"] == "completed"
    shutil.rmtree(runs / "r")
    run = recorded_run(runs / "r", 5, outcome="failed")
    write_rollouts(run, range(1, 2), 3)
    if listed:
        clock.now += 60
        assert {each["run"]: each["step"] for each in get(client, "runs")["runs"]}["r"] == 5
    page = get(client, "runs/r/rollouts")
    assert (page["total"], page["problems"]) == (3, [])
    assert get(client, "runs/r/rollouts/0001-2")["summary"]["id"] == "0001-2"
    assert get(client, "runs/r/status")["phase"] == "failed"
    shutil.rmtree(runs / "r")
    assert client.get("/api/runs/r/status").json() == {"error": "there is no run r"}
