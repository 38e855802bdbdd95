"""A run directory: its paths, the records in it that belong to no single process, and how it is made.

It is made with the recipe as given and as resolved, and a lock file of what it will run with.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.base.files import write_atomic
from primeslurm.plan import plan_file
from primeslurm.plan.model import JOB_OUTPUT, Plan
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.records.attempt import EndRecord, JobRecord, LockRecord, StartRecord
from primeslurm.records.fleet import AgentReport, AssignmentRecord, FleetView
from primeslurm.records.reading import find_record, read_record
from primeslurm.records.record import Record
from primeslurm.records.resolved_recipe import RunRecipe
from primeslurm.run.directory_security import permission_problems
from primeslurm.run.versions import commit, installed_packages
from primeslurm.wire.transport import addresses, secret

if TYPE_CHECKING:  # agents have no use for it
    from primeslurm.recipe import Recipe

R = TypeVar("R", bound=Record)

UNFINISHED = "its submission was interrupted before there was a job"
"""Of a run directory that was never submitted."""
START_FILE = "record.json"
"""In the start directory of an attempt."""
CANCEL_NOW = "now"
"""Content of `Attempt.cancel_file` if the attempt ends without a last checkpoint."""
BY_SIGTERM = "SIGTERM"
"""Reason of an attempt that was ended from outside."""


class Attempt:
    """One attempt of a run: `attempts/<n>/`.

    Args:
        run_dir: of the run.
        number: of the attempt.
        folder: name of its directory while it is made; the number by default.
    """

    def __init__(self, run_dir: Path, number: int, folder: str = "") -> None:
        self.number = number
        self.path = run_dir / "attempts" / (folder or str(number))

    @property
    def plan_file(self) -> Path:
        """The path of plan.json."""
        return self.path / "plan.json"

    @property
    def fleet_file(self) -> Path:
        """The path of fleet.json, written by the head."""
        return self.path / "fleet.json"

    @property
    def addresses_file(self) -> Path:
        """The path of addresses.json, written by the head once every process has its ports, and when one moves."""
        return self.path / addresses.FILE

    @property
    def assignment_file(self) -> Path:
        """The path of roster.json, written by the head: which agent plays which node of the plan."""
        return self.path / "roster.json"

    def assignment(self) -> AssignmentRecord:
        """Read which agent plays which node of the plan; empty before the head has decided."""
        return find_record(self.assignment_file, AssignmentRecord) or AssignmentRecord(0, {})

    def fleet(self) -> FleetView | None:
        """Read what the head tells of the fleet; None if it has told nothing yet.

        Raises:
            ValueError: the file is damaged.
        """
        return read_record(self.fleet_file, FleetView)

    @property
    def cancel_file(self) -> Path:
        """Present if the user wants the attempt to end."""
        return self.path / "cancel"

    def agent_file(self, rank: int) -> Path:
        """Return the path of the heartbeat of one agent."""
        return self.path / "agents" / f"{rank}.json"

    def heartbeat(self, node: int, assignment: AssignmentRecord) -> AgentReport | None:
        """Read the newest heartbeat of the agent that plays a node of the plan; None without one.

        Raises:
            ValueError: the file is damaged.
        """
        agent = assignment.agents.get(node)
        return read_record(self.agent_file(agent.rank), AgentReport) if agent else None

    def heartbeats(self) -> list[AgentReport]:
        """Read the newest heartbeat of every agent.

        Raises:
            ValueError: a file is damaged.
        """
        found = (read_record(path, AgentReport) for path in files.listing(self.path / "agents", "*.json"))
        return [report for report in found if report is not None]

    @property
    def reference_file(self) -> Path:
        """The path of preflight.json, written by the head."""
        return self.path / "preflight.json"

    def forget_agents(self) -> None:
        """Remove what agents and head have told each other, before others of this attempt begin anew."""
        told = (self.fleet_file, self.addresses_file, self.assignment_file, self.reference_file)
        for path in (*told, *files.listing(self.path / "agents", "*.json")):
            files.unlink(path)

    def prepare(self, plan: Plan) -> None:
        """Make the directory and write the plan, last: all on disk when this returns."""
        for name in ("agents", "events", "state", "logs"):
            durable.make_directory(self.path / name)
        durable.write(self.plan_file, plan_file.to_file(plan))

    def plan(self) -> Plan:
        """Read the plan of this attempt.

        Raises:
            RunError: it is not there, or cannot be read.
        """
        try:
            return plan_file.from_file(files.read_bytes(self.plan_file))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.plan_file} cannot be read: {error}") from None

    def job(self) -> JobRecord | None:
        """Read what was submitted, if it was recorded."""
        return find_record(self.path / "job.json", JobRecord)

    def record_job(self, job: JobRecord) -> None:
        """Write job.json; also for an attempt that has no plan yet."""
        durable.make_directory(self.path)
        durable.write_json(self.path / "job.json", msgspec.to_builtins(job))

    @property
    def start_directory(self) -> Path:
        """Present once a job has started to use the attempt."""
        return self.path / "start"

    def start(self) -> StartRecord | None:
        """Read which start of a job uses the attempt; None before that."""
        return find_record(self.start_directory / START_FILE, StartRecord)

    def end(self) -> EndRecord | None:
        """Read how it ended, or None."""
        return find_record(self.path / "end.json", EndRecord)

    def record_end(self, end: EndRecord) -> None:
        """Write end.json."""
        durable.write_json(self.path / "end.json", msgspec.to_builtins(end))

    def state(self, process: str, kind: type[R]) -> R | None:
        """Read the state that a process records of itself; None if there is none that can be read."""
        return find_record(self.path / "state" / f"{process}.json", kind)


class RunDirectory:
    """One run: `<runs>/<name>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def exists(self) -> bool:
        """Whether a run was ever made here."""
        try:
            return files.is_file(self.path / "lock.json")
        except OSError as error:  # another user's, or a name that no file can have
            if files.is_transient(error):
                raise
            return False

    def attempt(self, number: int) -> Attempt:
        """One attempt, whether or not it exists."""
        return Attempt(self.path, number)

    def attempts(self) -> list[Attempt]:
        """Return all attempts that have a plan, oldest first."""
        paths = files.settled_listing(self.path / "attempts")
        numbers = [int(path.name) for path in paths if path.name.isdecimal() and files.is_file(path / "plan.json")]
        return [self.attempt(number) for number in sorted(numbers)]

    def latest(self) -> Attempt:
        """Return the newest attempt that has a plan.

        Raises:
            RunError: there is none.
        """
        attempts = self.attempts()
        if not attempts:
            raise RunError(f"{self.path} has no attempt")
        return attempts[-1]

    def lock(self) -> LockRecord:
        """Read lock.json; an empty one if it cannot be read."""
        return find_record(self.path / "lock.json", LockRecord) or LockRecord()

    def recipe(self) -> RunRecipe:
        """Read what figures need of the resolved recipe; the defaults if it cannot be read."""
        return find_record(self.path / recipe_record.FILE, RunRecipe) or RunRecipe()

    @property
    def created_at(self) -> float:
        """When it was made, in Unix seconds; 0 if its lock file does not say."""
        return self.lock().created_at

    def job_output(self, job_id: str) -> Path:
        """Return the path of the file in which the batch script, srun and the agents of a job print."""
        return self.path / JOB_OUTPUT.format(job_id)

    @property
    def run_id(self) -> str:
        """The run's unique id."""
        return self.lock().run_id or self.name


def name_in_use(run_dir: Path) -> list[Violation]:
    """Return a violation if the run directory holds anything already, or is no directory."""
    if files.is_dir(run_dir) and not files.listing(run_dir):
        return []
    return [_in_use(run_dir)] if files.retrying(run_dir, lambda: os.path.lexists(run_dir)) else []


def _in_use(run_dir: Path) -> Violation:
    way = ""
    if RunDirectory(run_dir).exists():
        way = f", or `primeslurm resume {run_dir.name}` to go on with it"
    elif was_never_submitted(run_dir):
        way = f", or remove it: {UNFINISHED}"
    return Violation("name", run_dir.name, f"is in use: {run_dir} exists", f"`--name` another{way}")


def was_never_submitted(run_dir: Path) -> bool:
    """Whether a run directory was left half made: there is no lock file yet, which is written before any job."""
    run = RunDirectory(run_dir)
    jobs = [attempt.job() for attempt in run.attempts()]
    return files.is_dir(run_dir / "attempts") and not run.exists() and not any(job and job.job_id for job in jobs)


def missing_variables(plan: Plan) -> list[Violation]:
    """Return a violation for each variable that processes need and that is not set here, where its value comes from."""
    return [
        Violation("pass_env", name, "is not set where you submit", f"export {name}=...")
        for name in plan.pass_env
        if name not in os.environ
    ]


def create(recipe: Recipe, plan: Plan, source: Path, job: JobRecord | None = None) -> Attempt:
    """Create the run directory with its first attempt, or nothing.

    Args:
        recipe: as it was resolved.
        plan: of the first attempt.
        source: the recipe's file, of which a copy is kept.
        job: what is about to be submitted, if anything is.

    Raises:
        UsageError: the name is in use.
        OSError: it cannot be written.
    """
    run_dir = Path(plan.run_dir)
    if problems := name_in_use(run_dir) + permission_problems(run_dir):
        raise UsageError(problems)
    resolved = recipe.model_dump_json(by_alias=True, indent=2)
    lock = _lock(recipe.name, resolved, plan)  # takes longest: a process that is killed meanwhile leaves nothing
    durable.make_directory(run_dir, mode=0o700)
    if problems := permission_problems(run_dir):  # somebody else was faster, or the umask opened what was made
        raise UsageError(problems)
    try:
        files.retrying(run_dir, (run_dir / "attempts").mkdir)  # of several who submit a name at once, one makes it
    except FileExistsError:
        raise UsageError([_in_use(run_dir)]) from None
    try:
        return _fill(run_dir, resolved, lock, plan, source, job)
    except OSError as error:
        files.remove_tree(run_dir, ignore_errors=True)
        raise OSError(error.errno, error.strerror, error.filename or str(run_dir)) from error


def discard(attempt: Attempt) -> None:
    """Remove an attempt that nothing runs; the first one with its whole run."""
    first = attempt.number == 1
    files.remove_tree(attempt.path.parents[1] if first else attempt.path, ignore_errors=True)


def _fill(run_dir: Path, resolved: str, lock: LockRecord, plan: Plan, source: Path, job: JobRecord | None) -> Attempt:
    files.retrying(run_dir, lambda: run_dir.chmod(0o700))  # one that was there, empty, too
    secret.create(run_dir)
    write_atomic(run_dir / "recipe.yaml", files.read_bytes(source))
    write_atomic(run_dir / recipe_record.FILE, resolved + "\n")
    attempt = RunDirectory(run_dir).attempt(1)
    if job is not None:
        attempt.record_job(job)
    attempt.prepare(plan)
    durable.sync(run_dir)
    durable.write_json(run_dir / "lock.json", msgspec.to_builtins(lock))
    return attempt


def _lock(name: str, resolved: str, plan: Plan) -> LockRecord:
    return LockRecord(
        run_id=f"{name}-{secrets.token_hex(4)}",
        created_at=time.time(),
        recipe_hash=hashlib.blake2b(resolved.encode(), digest_size=16).hexdigest(),
        plan_hash=hashlib.blake2b(plan.to_json().encode(), digest_size=16).hexdigest(),
        python=sys.version.split()[0],
        packages=installed_packages(),
        git=commit(),
    )
