"""The first failure of an attempt, from events, heartbeats and logs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from primeslurm.base.files import write_json
from primeslurm.plan.model import Process
from primeslurm.records.attempt import EndRecord, JobRecord, Obstacle, StartRecord
from primeslurm.records.fleet import AgentReport
from primeslurm.run.attempt_claims import claim_start
from primeslurm.run.diagnosis.doctor import Diagnosis, diagnose
from primeslurm.run.diagnosis.failure_signatures import in_log, of_exit, of_job, of_reason
from primeslurm.run.diagnosis.logs import error_line, lines_until
from primeslurm.run.diagnosis.validity import problems
from primeslurm.run.directory import RunDirectory
from tests.support.cli import primeslurm
from tests.support.plans import plan_of, python

T0 = 1_790_000_000.0
OOM = "torch.OutOfMemoryError: CUDA out of memory. ProbeReport to allocate 2.00 GiB."
RESET = "RuntimeError: [../gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:1234"


def process(name: str, node: int) -> Process:
    role = "trainer" if name.startswith("trainer") else "decode"
    return Process(name=name, role=role, node=node, argv=python("pass"), log=f"logs/{role}/{name}.log")  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two trainer nodes and an engine, all started."""
    directory = RunDirectory(tmp_path / "runs" / "r")
    attempt = directory.attempt(1)
    nodes = [(process("trainer-rank-0", 0),), (process("trainer-rank-1", 1), process("decode-r0-0", 1))]
    attempt.prepare(plan_of(directory.path, *nodes))
    attempt.record_job(JobRecord("7", "slurm", T0))
    write_json(directory.path / "lock.json", {"run_id": "r-1", "created_at": T0})
    write_json(directory.path / "recipe.resolved.json", {"orchestrator": {"batch_size": 8}})
    for node in (0, 1):
        say(directory, f"agent-{node}", T0, "agent_started", node=f"n{node}")
        beat(directory, node, T0 + 100, ended=True)
    return directory


def beat(run: RunDirectory, rank: int, at: float, *, ended: bool) -> None:
    """The last heartbeat of an agent."""
    report = AgentReport(rank, f"n{rank}", f"10.0.0.{rank}", at, agent_pid=1, ended=ended)
    write_json(run.attempt(1).agent_file(rank), msgspec.to_builtins(report))


def say(run: RunDirectory, writer: str, at: float, kind: str, /, **fields: Any) -> None:
    with (run.attempt(1).path / "events" / f"{writer}.jsonl").open("a") as handle:
        handle.write(json.dumps({"time": at, "process": writer, "kind": kind, **fields}) + "\n")


def log(run: RunDirectory, name: str, at: float, *lines: str) -> None:
    role = "trainer" if name.startswith("trainer") else "decode"
    path = run.attempt(1).path / "logs" / role / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at))
    with path.open("a") as handle:
        handle.write("\n".join([f"--- {stamp} python -m x", *lines]) + "\n")


def end(run: RunDirectory, at: float, reason: str, suspect: str, outcome: str = "failed") -> None:
    say(run, "head", at, "ending", outcome=outcome, reason=reason, suspect=suspect)
    run.attempt(1).record_end(EndRecord(outcome, reason, suspect, 4, False, "", at + 5))


def diagnosis(run: RunDirectory, job: str | None = None) -> Diagnosis:
    return diagnose(run, run.attempt(1), lambda record: job)


def test_rank_that_ran_out_of_memory_comes_before_ranks_that_noticed(run: RunDirectory) -> None:
    log(run, "trainer-rank-0", T0, "step 3", "Traceback (most recent call last):", RESET)
    log(run, "trainer-rank-1", T0, "step 3", "Traceback (most recent call last):", OOM, "bye")
    say(run, "agent-0", T0 + 50.0, "exited", name="trainer-rank-0", code=1, state="failed")
    say(run, "agent-1", T0 + 50.4, "exited", name="trainer-rank-1", code=1, state="failed")
    end(run, T0 + 51, "trainer-rank-0 ended with exit code 1", "trainer-rank-0")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None and not diagnosed.well
    assert (diagnosed.first.failure.component, diagnosed.first.failure.node, diagnosed.first.failure.code) == (
        "trainer-rank-1",
        "n1",
        1,
    )
    assert diagnosed.first.error == OOM
    assert diagnosed.first.last_lines[-2:] == [OOM, "bye"]
    (cause,) = diagnosed.first.causes
    assert cause.cause == "a GPU ran out of memory" and cause.evidence == OOM
    assert [event.who for event in diagnosed.followed] == ["trainer-rank-0", "head"]


def test_killed_rank_comes_before_ranks_without_an_error(run: RunDirectory) -> None:
    log(run, "trainer-rank-0", T0, "a rank is gone")
    log(run, "trainer-rank-1", T0, "step 3")
    say(run, "agent-0", T0 + 50.0, "exited", name="trainer-rank-0", code=1, state="failed")
    say(run, "agent-1", T0 + 50.2, "exited", name="trainer-rank-1", code=-9, state="failed")
    end(run, T0 + 51, "trainer-rank-0 ended with exit code 1", "trainer-rank-0")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None and diagnosed.first.failure.component == "trainer-rank-1"
    assert [event.who for event in diagnosed.followed] == ["trainer-rank-0", "head"]


def test_recovered_failure_is_not_the_first_failure(run: RunDirectory) -> None:
    log(run, "decode-r0-0", T0, OOM)
    log(run, "decode-r0-0", T0 + 12, "serving")
    say(run, "agent-1", T0 + 10, "exited", name="decode-r0-0", code=-9, state="backoff")
    say(run, "agent-1", T0 + 12, "started", name="decode-r0-0", pid=5, restarts=1)
    say(run, "agent-0", T0 + 50, "exited", name="trainer-rank-0", code=-9, state="failed")
    end(run, T0 + 51, "trainer-rank-0 was ended by signal 9", "trainer-rank-0")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None and diagnosed.first.failure.component == "trainer-rank-0"
    assert "SIGKILL from outside" in diagnosed.first.causes[0].cause
    assert [failure.component for failure in diagnosed.recovered] == ["decode-r0-0"]


def test_repeatedly_failing_engine_has_not_recovered(run: RunDirectory) -> None:
    for restart, state in enumerate(("backoff", "backoff", "failed")):
        say(run, "agent-1", T0 + 10 * restart, "started", name="decode-r0-0", restarts=restart)
        log(run, "decode-r0-0", T0 + 10 * restart, f"OSError: [Errno 98] Address already in use ({restart})")
        say(run, "agent-1", T0 + 10 * restart + 5, "exited", name="decode-r0-0", code=1, state=state)
    end(run, T0 + 30, "decode-r0-0 ended with exit code 1 after 2 restarts", "decode-r0-0")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None and diagnosed.first.failure.time == T0 + 5
    assert diagnosed.first.error == "OSError: [Errno 98] Address already in use (0)"
    assert diagnosed.first.causes[0].cause.startswith("a port was taken") and diagnosed.recovered == []


def test_lost_node_comes_before_the_failures_it_caused(run: RunDirectory) -> None:
    beat(run, 1, T0 + 40, ended=False)
    log(run, "trainer-rank-0", T0, RESET)
    say(run, "agent-0", T0 + 100, "exited", name="trainer-rank-0", code=1, state="failed")
    end(run, T0 + 101, "trainer-rank-0 ended with exit code 1", "trainer-rank-0")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None
    assert (diagnosed.first.failure.component, diagnosed.first.failure.how) == (
        "node n1",
        "last heartbeat 1 min 1 s before the end",
    )
    assert "a node was lost" in diagnosed.first.causes[0].cause
    assert "trainer-rank-0" in [event.who for event in diagnosed.followed]


def test_node_replaced_by_a_spare_has_recovered(run: RunDirectory) -> None:
    say(run, "head", T0 + 95, "node_lost", node="n1", rank=1, reason="has been silent for 91 s")
    say(run, "head", T0 + 95, "node_replaced", node="n1", by="n2", index=1)
    diagnosed = diagnosis(run, "RUNNING")
    assert diagnosed.well
    assert [(f.component, f.time, f.how) for f in diagnosed.recovered] == [
        ("node n1", T0 + 4, "has been silent for 91 s")
    ]


def test_given_up_replica_is_a_failure_of_a_running_run(run: RunDirectory) -> None:
    say(run, "head", T0 + 95, "node_lost", node="n1", rank=1, reason="has been silent for 91 s")
    say(run, "head", T0 + 95, "given_up", processes=["decode-r0-0"], reason="node n1: has been silent for 91 s")
    diagnosed = diagnosis(run, "RUNNING")
    assert (diagnosed.outcome, diagnosed.well) == ("running", False)
    assert diagnosed.first is not None and diagnosed.first.failure.component == "node n1"
    assert "a node was lost" in diagnosed.first.causes[0].cause
    assert [event.text for event in diagnosed.followed if event.who == "head"] == [
        "continues without decode-r0-0: node n1: has been silent for 91 s"
    ]


def test_member_recovers_with_its_restart_group(run: RunDirectory) -> None:
    say(run, "agent-1", T0 + 10, "exited", name="decode-r0-0", code=1, state="fallen", reason="hangs")
    assert diagnosis(run, "RUNNING").first is not None
    say(run, "agent-1", T0 + 12, "started", name="decode-r0-0", restarts=0, generation=1)
    diagnosed = diagnosis(run, "RUNNING")
    assert diagnosed.well and diagnosed.recovered[0].how == "ended with exit code 1 (hangs)"


def test_stall_names_the_suspect(run: RunDirectory) -> None:
    say(run, "orchestrator", T0 + 60, "stall", suspect="trainer (has the batch of step 3)", seconds=600)
    say(run, "agent-0", T0 + 61, "exited", name="orchestrator", code=76, state="failed")
    end(run, T0 + 62, "orchestrator saw no progress: see its events", "orchestrator")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None and diagnosed.first.failure.component == "trainer (has the batch of step 3)"
    assert diagnosed.first.causes[0].cause == "the run stalled"


@pytest.mark.parametrize(
    ("kind", "fields", "code", "component", "cause"),
    [
        (
            "environment_fails",
            {"environment": "x", "error": "KeyError: 'a'", "failures": 9},
            77,
            "environment x",
            "the environment fails every time",
        ),
        (
            "stall",
            {"suspect": "algorithm", "error": "40 groups in a row were rejected (length: 40), none ...", "seconds": 9},
            76,
            "algorithm",
            "filters reject every group, so no batch forms",
        ),
    ],
)
def test_reason_of_the_orchestrator_is_named(
    run: RunDirectory, kind: str, fields: dict[str, object], code: int, component: str, cause: str
) -> None:
    say(run, "orchestrator", T0 + 60, kind, **fields)
    say(run, "agent-0", T0 + 61, "exited", name="orchestrator", code=code, state="failed")
    end(run, T0 + 62, "in its own words", "orchestrator")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None and diagnosed.first.failure.component == component
    assert str(fields["error"]) in diagnosed.first.failure.how
    assert diagnosed.first.causes[0].cause == cause and "py-spy" not in diagnosed.first.causes[0].fix


def test_environments_that_do_not_load_on_nodes_are_named(run: RunDirectory) -> None:
    reason = "environments do not load on node n1: environments.0.id = x: no such environment"
    say(run, "head", T0 + 5, "ending", outcome="failed", reason=reason, suspect="environments")
    end(run, T0 + 6, reason, "environments")
    diagnosed = diagnosis(run)
    assert diagnosed.first is not None and diagnosed.first.failure.component == "environments"
    assert diagnosed.first.causes[0].cause == "an environment does not load on the nodes"


@pytest.mark.parametrize(
    ("job", "cause"), [("TIMEOUT", "the time limit was reached"), ("NODE_FAIL", "a node of the job went down")]
)
def test_job_without_an_end_record_is_judged_by_its_slurm_state(run: RunDirectory, job: str, cause: str) -> None:
    (run.path / "slurm-7.out").write_text("slurmstepd: something\n")
    diagnosed = diagnosis(run, job)
    assert diagnosed.outcome == job and diagnosed.first is not None
    assert (diagnosed.first.failure.component, diagnosed.first.causes[0].cause) == ("job", cause)
    assert diagnosed.first.last_lines == ["slurmstepd: something"]


@pytest.mark.parametrize("outcome", ["completed", "cancelled", "preempted"])
def test_completed_attempt_has_no_failure(run: RunDirectory, outcome: str) -> None:
    end(run, T0 + 50, "", "", outcome)
    assert diagnosis(run).well and diagnosis(run).first is None


def test_running_attempt_has_no_failure(run: RunDirectory) -> None:
    assert diagnosis(run, "RUNNING").well


def test_log_lines_of_one_start_are_read(run: RunDirectory) -> None:
    for start in (0, 100, 200):
        log(run, "decode-r0-0", T0 + start, f"started at {start}")
    path = run.attempt(1).path / "logs" / "decode" / "decode-r0-0.log"
    assert lines_until(path, T0 + 150) == ["started at 100"]
    assert lines_until(path, T0 + 500) == ["started at 200"]
    assert lines_until(path.with_name("none.log"), T0) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a", "ValueError: first", "direct cause of the following exception:", "KeyError: 'x'"], "ValueError: first"),
        (["KeyError: 'earlier'", "fine again", "ValueError: last"], "ValueError: last"),
        (["ValueError: root", "RuntimeError: Engine core failed. See root cause above."], "ValueError: root"),
        (["all is well", "FATAL: no licence", "bye"], "FATAL: no licence"),
        (["x: Connection reset by peer", OOM], OOM),
        (["nothing here"], None),
    ],
)
def test_error_line_of_a_log(lines: list[str], expected: str | None) -> None:
    assert error_line(lines) == expected


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "a collective timed out"),
        ("nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND", "KV transfer"),
        ("[1700000.1] [n1:1:0] ucp_ep.c:1 UCX  ERROR no remote ep", "KV transfer"),
        ("zmq.error.ZMQError: Address already in use (addr='tcp://10.0.0.1:8000')", "a port was taken"),
        ("OSError: [Errno 28] No space left on device", "a disk, quota"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m/config.json'", "model files are missing"),
        ("OSError: /m does not appear to have a file named config.json", "model files are missing"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0", "the node ran out of CPU memory"),
        ("ValueError: No available memory for the cache blocks.", "the KV cache does not fit"),
        (
            "ValueError: Free memory on device cuda:0  is less than desired GPU memory utilization (0.9,",
            "another process uses memory",
        ),
        ("FloatingPointError: the gradient norm is nan", "training diverged"),
        ("ImportError: libcudart.so.13: cannot open shared object file", "a package or library is missing"),
        ("OSError: [Errno 116] Stale file handle: '/runs/r'", "the shared file system failed"),
    ],
)
def test_known_causes_are_found_in_logs(line: str, cause: str) -> None:
    ((known, evidence),) = in_log(["INFO step 3: loss 0.1", line])
    assert known.cause.startswith(cause) and evidence == line


def test_advice_on_a_taken_port_names_the_fields_that_fix_ports() -> None:
    ((known, _),) = in_log(["[Errno 98] error while attempting to bind on address: [errno 98] address in use"])
    for field in ("deployment.inference.router_port", "backend_port", "port_base"):
        assert field in known.fix


def test_ordinary_lines_have_no_cause() -> None:
    lines = ["INFO NIXL is available", "Using NixlConnector", "error: 0", "nixl agent created", "model loaded"]
    assert in_log(lines) == []


def test_cause_is_the_exception_and_not_printed_options() -> None:
    """The options that an engine prints contain names of failures."""
    failed = "AssertionError: (16384, 512) <= torch.Size([17408, 256])"
    lines = [
        "(API pid=1) INFO 11-25 21:46:43 [api_utils.py:286] args: {'kv_connector': 'NixlConnector', 'kv': 'fail'}",
        "(API pid=1) WARNING 11-25 21:46:43 [system_utils.py:255] ulimit of 20000: [Errno 24] Too many open files",
        "[rank0]:[W1125 21:47:49.083850776 ProcessGroupNCCL.cpp:1624] Warning: ... Broken pipe",
        "2026-11-25 22:04:50,662 WARNING primeslurm.orchestrator: metrics are lost: Connection refused",
        "(EngineCore pid=2) ERROR 11-25 21:50:47 [core.py:1510] Traceback (most recent call last):",
        f"(EngineCore pid=2) ERROR 11-25 21:50:47 [core.py:1510] {failed}",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert in_log(lines) == []
    assert error_line(lines) == failed
    assert error_line(lines[:4]) is None


def test_causes_of_exit_codes_reasons_and_states() -> None:
    assert of_exit(None) == of_exit(1) == [] and of_exit(-9) == of_exit(137)
    assert "native code crashed" in of_exit(-11)[0].cause
    assert of_reason("USR2: time limit or preemption")[0].cause == "preemption or the time limit"
    for reason in ("node n1: no sign of its agent within 300 s", "node n1: its preflight has not ended within 300 s"):
        assert "node_start_s" in of_reason(reason)[0].fix
    assert of_job("OUT_OF_MEMORY (x)")[0].cause == "the node ran out of CPU memory" and of_job("RUNNING") == []


GOOD = {
    "trainer/tokens": 500.0,
    "rollouts/sampled_mean": 9.0,
    "groups/zero_signal": 0.5,
    "trainer/mismatch_kl": 1e-5,
    "rollouts/dropped_stale": 2.0,
    "trainer/loss": 0.1,
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"trainer/tokens": 1.0}, "no token was trained on in the last 5 steps"),
        ({"rollouts/sampled_mean": 0.0}, "engines sampled no token in the last 5 steps"),
        ({"groups/zero_signal": 1.0}, "all rewards of each group were equal in the last 5 steps"),
        ({"trainer/mismatch_kl": 0.5}, "trainer and engines disagree about the same policy: KL 0.5"),
        ({"rollouts/dropped_stale": 200.0}, "1000 rollouts were dropped as too old, 40 were trained on"),
        ({"trainer/loss": float("nan")}, "trainer/loss is nan in step 0"),
        ({"trainer/impossible_fraction": 0.0, "trainer/skipped": 0.0}, None),
        (
            {"trainer/impossible_fraction": 0.2},
            "engines gave sampled tokens impossible log-probabilities in the last 5 steps",
        ),
        (
            {"trainer/loss": float("nan"), "trainer/skipped": 1.0},
            "the gradient was not finite in 5 of the last 5 steps",
        ),
    ],
)
def test_run_is_invalid(change: dict[str, float], problem: str | None) -> None:
    reasons = problems([{"step": i, **GOOD, **change} for i in range(5)], 0, batch_size=8)
    assert [text[: len(problem)] for text in reasons] == [problem] if problem else reasons == []


def test_few_skipped_steps_are_valid() -> None:
    skipped = {"trainer/loss": float("nan"), "trainer/grad_norm": float("inf"), "trainer/skipped": 1.0}
    assert problems([{"step": i, **GOOD, **(skipped if i in (1, 3) else {})} for i in range(5)], 0, 8) == []


def test_validity_needs_evidence_and_counts_dropped_rollouts() -> None:
    assert problems([{"groups/zero_signal": 1.0}] * 2, 0, 8) == []
    assert problems([], 0, 8) == []
    assert problems([], 64, 8) == ["64 rollouts were dropped as too old, 0 were trained on"]
    assert problems([{"trainer/mismatch_kl": 0.5}] * 5, 0, 8, max_kl=1.0) == []


def test_doctor_shows_the_diagnosis_and_exits_with_1(run: RunDirectory, tmp_path: Path) -> None:
    log(run, "trainer-rank-0", T0, OOM)
    say(run, "agent-0", T0 + 50, "exited", name="trainer-rank-0", code=1, state="failed")
    end(run, T0 + 51, "trainer-rank-0 ended with exit code 1", "trainer-rank-0")
    result = primeslurm("doctor", "r", cwd=tmp_path)
    assert result.code == 1, result.err
    assert "trainer-rank-0 on n0 ended with exit code 1" in result.out
    assert f"error  {OOM}" in result.out and "cause  a GPU ran out of memory" in result.out
    diagnosed = json.loads(primeslurm("doctor", "r", "--json", cwd=tmp_path).out)
    assert diagnosed["first"]["failure"]["component"] == "trainer-rank-0"
    result = primeslurm("doctor", "r", "--attempt", "3", cwd=tmp_path)
    assert (result.code, result.err) == (2, "error: --attempt = 3: does not exist; the attempts are 1 (nearest: 1)\n")


def test_router_that_lost_workers_is_reported(run: RunDirectory) -> None:
    lost = {"serves": 0, "planned": 2, "missing": ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]}
    say(run, "router-0", T0 + 5, "router_incomplete", **lost)
    diagnosed = diagnosis(run, "RUNNING")
    assert diagnosed.first is not None and diagnosed.first.failure.component == "router-0"
    assert diagnosed.first.failure.how == "served 0 of 2 engines; its list of engines is corrected"
    say(run, "router-0", T0 + 7, "router_complete", planned=2, seconds=2.0)
    diagnosed = diagnosis(run, "RUNNING")
    assert diagnosed.first is None and [each.component for each in diagnosed.recovered] == ["router-0"]


def test_restarted_router_is_reported(run: RunDirectory) -> None:
    say(run, "router-0", T0 + 5, "router_restarted", reason="it was shown 4096 MiB of wrong tokens, which it keeps")
    diagnosed = diagnosis(run, "RUNNING")
    assert diagnosed.first is None
    (failure,) = diagnosed.recovered
    assert failure.component == "router-0" and "wrong tokens" in failure.how


def test_error_of_srun_is_taken_from_the_right_start(run: RunDirectory) -> None:
    fatal = "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive"
    requeued = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-01T10:00:00 DUE TO JOB REQUEUE ***"
    output = [
        "primeslurm: start s1",
        "srun: error: of the start before",
        "primeslurm: start s2",
        f"{fatal}.",
        requeued,
        "primeslurm: start s3",
        "RuntimeError: of the start after",
    ]
    run.job_output("7").write_text("".join(f"{line}\n" for line in output))
    run.job_output("8").write_text("RuntimeError: of a job that does not own the run\n")
    attempt = run.attempt(1)
    assert claim_start(attempt, StartRecord("s2", "7", "n0", T0))
    why_not = "the attempt before ended with the same error, and neither made progress"
    attempt.record_end(EndRecord("failed", f"no agent could be started: {fatal}", "job", None, False, why_not, T0 + 5))
    diagnosed = diagnosis(run)
    assert diagnosed.reason == f"no agent could be started: {fatal}; {why_not}"
    assert diagnosed.first is not None and diagnosed.first.error == fatal
    assert diagnosed.first.last_lines == [f"{fatal}."]
    assert diagnosed.first.causes[0].cause == "srun could not start the agents"


def test_job_that_cannot_start_is_a_failure_with_all_obstacles(run: RunDirectory) -> None:
    attempt = run.latest()
    attempt.record_job(JobRecord("7", "slurm", 1000.0))
    obstacles = [
        Obstacle("train", "PartitionTimeLimit", "asks for more time", "a shorter slurm.time"),
        Obstacle("decode", "QOSMaxGRESPerJob", "asks for more", "ask for less"),
    ]
    assert diagnose(run, attempt, lambda job: "PENDING (Resources)").well
    diagnosed = diagnose(run, attempt, lambda job: "PENDING (Resources)", find_obstacles=lambda job: obstacles)
    assert diagnosed.first is not None and not diagnosed.well
    assert diagnosed.first.failure.component == "component train"
    assert diagnosed.first.failure.how == "cannot start: asks for more time (PartitionTimeLimit)"
    assert [(cause.cause, cause.fix) for cause in diagnosed.first.causes] == [
        ("train asks for more time", "a shorter slurm.time"),
        ("decode asks for more", "ask for less"),
    ]
    running = diagnose(run, attempt, lambda job: "RUNNING", find_obstacles=lambda job: obstacles)
    assert running.first is None or "cannot start" not in running.first.failure.how
