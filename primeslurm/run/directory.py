"""Paths of a run directory, and the records in it that belong to no single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from primeslurm.errors import RunError
from primeslurm.plan.model import JOB_OUTPUT, Plan
from primeslurm.recipe.paths import is_dir, is_file
from primeslurm.run.roster import Roster
from primeslurm.wire import addresses
from primeslurm.wire.files import read_json, write_atomic, write_json

T = TypeVar("T")

BY_SIGTERM = "SIGTERM"
"""Reason of an attempt that was ended from outside."""


class JobRecord(msgspec.Struct, frozen=True):
    """`job.json`: what was submitted."""

    job_id: str
    executor: str
    """slurm or local."""
    submitted_at: float
    slurm_conf: str | None = None


class EndRecord(msgspec.Struct, frozen=True):
    """`end.json`: how an attempt ended."""

    outcome: str
    reason: str
    suspect: str
    committed_step: int | None
    requeued: bool
    why_not_requeued: str
    time: float


class Attempt:
    """One attempt of a run: `attempts/<n>/`."""

    def __init__(self, run_dir: Path, number: int) -> None:
        self.number = number
        self.path = run_dir / "attempts" / str(number)

    @property
    def plan_file(self) -> Path:
        """plan.json"""
        return self.path / "plan.json"

    @property
    def fleet_file(self) -> Path:
        """fleet.json, written by the head."""
        return self.path / "fleet.json"

    @property
    def addresses_file(self) -> Path:
        """addresses.json, written by the head once every process has its ports, and when one moves."""
        return self.path / addresses.FILE

    @property
    def roster_file(self) -> Path:
        """roster.json, written by the head: which agent plays which node of the plan."""
        return self.path / "roster.json"

    def roster(self) -> Roster:
        """Which agent plays which node of the plan; empty before the head has decided."""
        return _read(self.roster_file, Roster) or Roster(0, {})

    @property
    def cancel_file(self) -> Path:
        """Present if the user wants the attempt to end."""
        return self.path / "cancel"

    def agent_file(self, rank: int) -> Path:
        """The heartbeat of one agent."""
        return self.path / "agents" / f"{rank}.json"

    def heartbeat(self, node: int, roster: Roster) -> dict[str, Any]:
        """The newest heartbeat of the agent that plays a node of the plan; empty if there is none."""
        seat = roster.seats.get(node)
        return (read_json(self.agent_file(seat.rank)) if seat else None) or {}

    def forget_agents(self) -> None:
        """Remove what agents and head have told each other, before others of this attempt begin anew."""
        told = (self.fleet_file, self.addresses_file, self.roster_file, self.path / "preflight.json")
        for path in (*told, *(self.path / "agents").glob("*.json")):
            path.unlink(missing_ok=True)

    def prepare(self, plan: Plan) -> None:
        """Make the directory and write the plan, last."""
        for name in ("agents", "events", "state", "logs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        write_atomic(self.plan_file, plan.to_json())

    def plan(self) -> Plan:
        """The plan of this attempt. Raises RunError."""
        try:
            return Plan.model_validate_json(self.plan_file.read_bytes())
        except (OSError, ValueError) as error:
            raise RunError(f"{self.plan_file} cannot be read: {error}") from None

    def job(self) -> JobRecord | None:
        """What was submitted, if it was recorded."""
        return _read(self.path / "job.json", JobRecord)

    def record_job(self, job: JobRecord) -> None:
        """Write job.json; also for an attempt that has no plan yet."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "job.json", msgspec.to_builtins(job))

    def end(self) -> EndRecord | None:
        """How it ended, or None."""
        return _read(self.path / "end.json", EndRecord)

    def record_end(self, end: EndRecord) -> None:
        """Write end.json."""
        write_json(self.path / "end.json", msgspec.to_builtins(end))

    def state(self, process: str) -> dict[str, Any]:
        """The current state that a process recorded of itself; empty if none."""
        value = read_json(self.path / "state" / f"{process}.json")
        return value if isinstance(value, dict) else {}


class RunDirectory:
    """`<runs>/<name>/`"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def exists(self) -> bool:
        """Whether a run was ever made here."""
        return is_file(self.path / "lock.json")

    def attempt(self, number: int) -> Attempt:
        """One attempt, whether or not it exists."""
        return Attempt(self.path, number)

    def attempts(self) -> list[Attempt]:
        """All attempts that have a plan, oldest first."""
        root = self.path / "attempts"
        if not is_dir(root):
            return []
        numbers = sorted(int(p.name) for p in root.iterdir() if p.name.isdecimal() and is_file(p / "plan.json"))
        return [self.attempt(number) for number in numbers]

    def latest(self) -> Attempt:
        """The newest attempt. Raises RunError if there is none."""
        attempts = self.attempts()
        if not attempts:
            raise RunError(f"{self.path} has no attempt")
        return attempts[-1]

    def lock(self) -> dict[str, Any]:
        """lock.json: run id, versions, hashes."""
        value = read_json(self.path / "lock.json")
        return value if isinstance(value, dict) else {}

    @property
    def created_at(self) -> float:
        """When it was made, in Unix seconds; 0 if its lock file does not say."""
        value = self.lock().get("created_at")
        return value if isinstance(value, int | float) else 0.0

    def job_output(self, job_id: str) -> Path:
        """What the batch script, srun and the agents of a job of Slurm print."""
        return self.path / JOB_OUTPUT.format(job_id)

    @property
    def run_id(self) -> str:
        """The run's unique id."""
        return str(self.lock().get("run_id", self.name))


def _read(path: Path, kind: type[T]) -> T | None:
    value = read_json(path)
    if value is None:
        return None
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return None
