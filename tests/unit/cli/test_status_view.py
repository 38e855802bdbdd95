"""The dashboard of runs with one node and with 128."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from primeslurm.cli.output import note, print_json
from primeslurm.cli.verbs import watch
from primeslurm.cli.views.status import numbers_of, one_line, sparkline, view
from primeslurm.cli.views.tables import PlainConsole
from primeslurm.records.evaluation import BestCheckpoint, Estimated, EvaluationProgress, EvaluationRecord, LabelResult
from primeslurm.records.state import FailedRollouts, Load
from primeslurm.run.status.advice import Advice
from primeslurm.run.status.event_text import EventText
from primeslurm.run.status.run_status import ProcessStatus, ReplicaStatus, RlProgress, RunStatus


def picture(status: RunStatus, width: int = 100) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(view(status))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def status_of(replicas: int, ill: int) -> RunStatus:
    prefill = Load(engines=24, running=24, waiting=30, kv_usage=0.4, prefix_hit_rate=0.5)
    decode = Load(engines=8, running=200, kv_usage=0.6, generated_per_s=1000.4)
    return RunStatus(
        run="glm5",
        run_id="glm5-1",
        directory="/runs/glm5",
        task="rl",
        attempt=2,
        job_id="77",
        phase="running",
        reason="",
        max_steps=400,
        committed_step=10,
        step=12,
        version=12,
        elapsed_s=3723.4,
        eta_s=90000,
        progress=RlProgress(ready_groups=5, open_groups=9, inflight=300),
        metrics={"step": 12, "reward/mean": 0.5, "staleness/mean": 1.25},
        history={"reward/mean": [0.1, 0.2, 0.5], "staleness/mean": [1.0]},
        roles={"trainer": {"HEALTHY": 128 - ill, "SUSPECT": ill}, "prefill": {"HEALTHY": 24 * replicas}},
        replicas=[
            ReplicaStatus(i, "HEALTHY" if i else "RESTARTING", 32, 32, {"prefill": prefill, "decode": decode})
            for i in range(replicas)
        ],
        unhealthy=[ProcessStatus(f"trainer-rank-{i}", "trainer", "n1", "SUSPECT", 4, 0) for i in range(ill)],
        events=[EventText(0.0, "router-0", "was ended by SIGKILL", "warning")] * 8,
        advice=[Advice("prefill is saturated", "because", {"deployment.inference.prefill.num_replicas": 4})],
    )


def test_failed_rollouts_are_shown_by_environment() -> None:
    failures = {
        "swe": FailedRollouts(63, 60, "SandboxError: no disk", tasks_given_up=2),
        "math": FailedRollouts(1, 1, "TimeoutError"),
        "deadly": FailedRollouts(0, 0, "3 environment workers died while they ran it, at last alone", 1),
    }
    status = msgspec.structs.replace(status_of(1, 0), progress=RlProgress(failures=failures))
    shown = picture(status)
    assert "swe: 63 failed rollouts, 60 with: SandboxError: no disk; 2 tasks given up" in shown
    assert "math: 1 failed rollout, 1 with: TimeoutError" in shown
    assert "deadly: 1 task given up: 3 environment workers died while they ran it, at last alone" in shown
    assert msgspec.to_builtins(status)["progress"]["failures"]["swe"]["failed"] == 63


HOSTILE = "\x1b]0;gone\x07\x1b[2J\x9b31mX\x08\rY\u202eZ [red]a[/red] [/nothing] :smile:"
HARMLESS = "]0;gone[2J31mXYZ [red]a[/red] [/nothing] :smile:"


def test_texts_of_rollouts_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    failures = {"swe": FailedRollouts(1, 1, HOSTILE)}
    status = msgspec.structs.replace(
        status_of(1, 1), progress=RlProgress(failures=failures), reason=HOSTILE, run=HOSTILE, waits_for=HOSTILE
    )
    status = msgspec.structs.replace(
        status,
        events=[EventText(0.0, HOSTILE, HOSTILE, "warning")],
        unhealthy=[ProcessStatus(HOSTILE, "trainer", HOSTILE, "SUSPECT", 4, 0)],
    )
    console = PlainConsole(file=StringIO(), width=400, force_terminal=True)
    console.print(view(status))
    console.print(f"reason: {HOSTILE}")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count(HARMLESS) >= 7
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", shown)  # colours are rich's own
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", without_colours)
    note(HOSTILE)
    watch._print([(Path("swe-0.log"), HOSTILE)], as_json=False)
    streams = capsys.readouterr()
    assert streams.err == f"{HARMLESS}\n" and streams.out == f"swe-0 | {HARMLESS}\n"
    print_json({"reason": HOSTILE})
    assert capsys.readouterr().out.isascii()


def test_sft_run_shows_loss_and_speed() -> None:
    newest = {"step": 12, "trainer/loss": 1.5, "trainer/tokens_per_s": 900.0, "throughput/step_seconds": 2.0}
    status = msgspec.structs.replace(
        status_of(0, 0), task="sft", metrics=newest, history={"trainer/loss": [3.0, 2.0, 1.5]}, progress={}
    )
    text = "\n".join(picture(status))
    assert "loss █▃▁" in text and "policy" not in text
    assert numbers_of(status) == [("loss", "1.5000"), ("tokens/s", "900"), ("s/step", "2.0")]


def test_small_run_shows_one_line_per_replica() -> None:
    lines = picture(status_of(replicas=2, ill=1))
    (line,) = [line for line in lines if line.startswith("1  ")]
    assert line.split() == ["1", "HEALTHY", "32/32", "30/0", "24/200", "40%/60%", "50%/-", "1,000"]
    text = "\n".join(lines)
    assert "elapsed 1 h 2 min" in text and "ETA 1 d 1 h" in text
    assert "5 groups ready, 9 open, 300 rollouts in flight" in text
    assert "reward ▁▂█" in text and "was ended by SIGKILL" in text
    assert "deployment.inference.prefill.num_replicas: 4" in text


def test_rollouts_are_counted_per_environment_node() -> None:
    status = status_of(2, 0)
    assert isinstance(status.progress, RlProgress)
    spread = msgspec.structs.replace(status.progress, rollouts_by_node={"29": 90, "30": 110, "31": 100})
    lines = picture(msgspec.structs.replace(status, progress=spread))
    assert "queue 5 groups ready, 9 open, 300 rollouts in flight, 90 to 110 on each of 3 environment nodes" in lines


def test_large_run_sums_up_healthy_replicas_and_fits_a_terminal() -> None:
    lines = picture(status_of(replicas=128, ill=200))
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "127 healthy" in text and "4064/4064" in text
    assert [line.split()[:2] for line in lines if "RESTARTING" in line] == [["0", "RESTARTING"]]
    assert "and 192 more" in text


def test_evaluation_is_one_line() -> None:
    result = LabelResult("held-out", 16, 4, Estimated(0.5, 0.0625), {1: Estimated(0.1), 4: Estimated(0.75, 0.05)}, 0.25)
    record = EvaluationRecord(10, 10, 10, 12, 0.0, 61.0, [result])
    best = BestCheckpoint(5, "held-out/pass@4", 0.8)
    progress = RlProgress(evaluation=EvaluationProgress(15, 12, 64, 8, record, best))
    lines = picture(msgspec.structs.replace(status_of(1, 0), progress=progress), width=160)
    assert (
        "evaluation step 10: held-out 0.500 ± 0.062, pass@4 0.750 ± 0.050, 25% failed  "
        "step 15 is running: 12/64 samples  best step 5: held-out/pass@4 0.800"
    ) in [line.rstrip() for line in lines]
    none_yet = RlProgress(evaluation=EvaluationProgress())
    assert "evaluation none yet" in picture(msgspec.structs.replace(status_of(1, 0), progress=none_yet))
    assert not any("evaluation" in line for line in picture(status_of(1, 0)))


def test_nothing_is_cut_at_80_columns() -> None:
    assert not any("…" in line for line in picture(status_of(replicas=128, ill=9), width=80))


def test_a_long_event_cuts_neither_its_time_nor_its_process() -> None:
    event = EventText(1.0, "environment-math-0", "a reason of many words " * 20, "warning")
    lines = picture(msgspec.structs.replace(status_of(1, 0), events=[event]), width=80)
    assert any(re.match(r"\d\d:\d\d:\d\d  environment-math-0  a reason .*…$", line) for line in lines), lines


def test_sparkline_and_one_line_status() -> None:
    assert sparkline([0.0, 1.0, float("nan"), 2.0]) == "▁▄█" and sparkline([3.0]) == "▁" and sparkline([]) == ""
    assert len(sparkline(list(range(100)))) == 24
    status = status_of(1, 0)
    assert numbers_of(status) == [("reward", "0.500"), ("staleness", "1.25")]
    assert one_line(status) == "glm5 running  step 12/400  reward 0.500  staleness 1.25"


def test_silent_phase_is_shown_as_unresponsive() -> None:
    rank = ProcessStatus("trainer-rank-0", "trainer", "n1", "SILENT", 4, 0, silent="silent for 12 s, phase loop")
    silent = {"trainer": {"SILENT": 1, "HEALTHY": 7}}
    status = msgspec.structs.replace(status_of(1, 0), phase="silent", roles=silent, unhealthy=[rank])
    text = "\n".join(picture(status))
    assert "glm5  unresponsive  attempt 2" in text and "1 UNRESPONSIVE  7 HEALTHY" in text
    assert "UNRESPONSIVE for 12 s, phase loop" in text and "silent" not in text.lower()
    assert one_line(status).startswith("glm5 unresponsive")


def test_numbers_of_an_emulated_run_are_marked_as_made_up() -> None:
    status = msgspec.structs.replace(status_of(1, 0), emulated=True)
    assert "emulated: stand-ins made up all rewards, losses and speeds" in picture(status)
    assert one_line(status).startswith("glm5 (emulated) running")
    assert not any("emulated" in line for line in [*picture(status_of(1, 0)), one_line(status_of(1, 0))])
