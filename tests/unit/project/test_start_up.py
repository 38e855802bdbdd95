"""The benchmark of the start shows what each second of a run's start was."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.start_up import marks, table
from primeslurm.records.events import nodes, processes, training
from primeslurm.records.record import Event
from primeslurm.run.directory import RunDirectory

T = 1_795_000_000.5  # 2026-11-18 11:06:40 UTC
LOG = """\
INFO:     Started server process [7]
(APIServer pid=7) INFO 11-18 13:07:05 [api_utils.py:339] non-default args: {}
(APIServer pid=7) INFO 11-18 13:07:09 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=9) INFO 11-18 13:09:00 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: x
"""


def test_parts_of_a_start_are_listed_by_process(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path).attempt(1)
    log = attempt.path / "logs" / "engine" / "engine-r0-0.log"
    log.parent.mkdir(parents=True)
    log.write_text(LOG)  # two hours ahead of UTC
    events: dict[str, list[Event]] = {
        "agent-0": [
            nodes.AgentStarted("n0", "10.0.0.1", time=T),
            processes.ProcessStarted("engine-r0-0", time=T + 2),
        ],
        "trainer-rank-0": [
            training.WarmedUp(20.0, time=T + 30),
            training.StepTrained(1, time=T + 40),
            training.StepTrained(2, time=T + 41),
        ],
        "trainer-rank-1": [training.TrainerStarted(time=T + 3)],
    }
    for name, written in events.items():
        path = attempt.path / "events" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = [msgspec.json.encode(msgspec.structs.replace(event, process=name)) for event in written]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    assert table(marks(attempt)).splitlines()[2:] == [
        "| 0.0 | agent-0 | agent runs | 0.0 |",
        "| 2.0 | engine-r0-0 | process started | 2.0 |",
        "| 24.5 | engine-r0-0 | API server imported | 22.5 |",
        "| 28.5 | engine-r0-0 | model class inspected | 4.0 |",
        "| 30.0 | trainer-rank-0 | compiled with a synthetic batch | 30.0 |",
        "| 40.0 | trainer-rank-0 | step 1 trained | 10.0 |",
    ]
