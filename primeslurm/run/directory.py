"""A run directory: its paths, its shared records, and its creation.

It keeps the recipe as written and as resolved, and a lock file with the versions of all packages.
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

# Describes a run directory without lock file and job.
UNFINISHED = "its submission was interrupted before there was a job"
# Name of the record in the start directory of an attempt.
START_FILE = "record.json"
# Content of `Attempt.cancel_file` if the attempt ends without a last checkpoint.
CANCEL_NOW = "now"
# Reason of an attempt that Slurm or a user ended with a signal.
BY_SIGTERM = "SIGTERM"


class Attempt:
    """One attempt of a run: `attempts/<n>/`, or `attempts/<folder>/` while the attempt is created."""

    def __init__(self, run_dir: Path, number: int, folder: str = "") -> None:
        self.number = number
        self.path = run_dir / "attempts" / (folder or str(number))

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def fleet_file(self) -> Path:
        """fleet.json, written by the head."""
        return self.path / "fleet.json"

    @property
    def addresses_file(self) -> Path:
        """addresses.json, written by the head when all processes have ports, and when a process moves."""
        return self.path / addresses.FILE

    @property
    def assignment_file(self) -> Path:
        """roster.json, the node assignment that the head writes."""
        return self.path / "roster.json"

    def assignment(self) -> AssignmentRecord:
        """Return the node assignment; empty before the head has made one."""
        return find_record(self.assignment_file, AssignmentRecord) or AssignmentRecord(0, {})

    def fleet(self) -> FleetView | None:
        """Return the head's view of the fleet; None without a file. Raises ValueError if the file is damaged."""
        return read_record(self.fleet_file, FleetView)

    @property
    def cancel_file(self) -> Path:
        """File that asks the head to end the attempt."""
        return self.path / "cancel"

    def agent_file(self, rank: int) -> Path:
        return self.path / "agents" / f"{rank}.json"

    def heartbeat(self, node: int, assignment: AssignmentRecord) -> AgentReport | None:
        """Return the last heartbeat of the agent assigned to a node, or None. Raises ValueError if it is damaged."""
        agent = assignment.agents.get(node)
        return read_record(self.agent_file(agent.rank), AgentReport) if agent else None

    def heartbeats(self) -> list[AgentReport]:
        """Return the last heartbeat of every agent. Raises ValueError if a file is damaged."""
        reports = (read_record(path, AgentReport) for path in files.listing(self.path / "agents", "*.json"))
        return [report for report in reports if report is not None]

    @property
    def reference_file(self) -> Path:
        """preflight.json, written by the head."""
        return self.path / "preflight.json"

    def forget_agents(self) -> None:
        """Remove the messages between head and agents before the attempt starts its agents again."""
        messages = (self.fleet_file, self.addresses_file, self.assignment_file, self.reference_file)
        for path in (*messages, *files.listing(self.path / "agents", "*.json")):
            files.unlink(path)

    def prepare(self, plan: Plan) -> None:
        """Create the directory and write the plan durably."""
        # The plan comes last: an attempt with a plan is complete.
        for name in ("agents", "events", "state", "logs"):
            durable.make_directory(self.path / name)
        durable.write(self.plan_file, plan_file.to_file(plan))

    def plan(self) -> Plan:
        """Return the plan of this attempt. Raises RunError if it is missing or cannot be read."""
        try:
            return plan_file.from_file(files.read_bytes(self.plan_file))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.plan_file} cannot be read: {error}") from None

    def job(self) -> JobRecord | None:
        return find_record(self.path / "job.json", JobRecord)

    def record_job(self, job: JobRecord) -> None:
        """Write job.json, also for an attempt without a plan."""
        durable.make_directory(self.path)
        durable.write_json(self.path / "job.json", msgspec.to_builtins(job))

    @property
    def start_directory(self) -> Path:
        """Directory that exists once a job has started to use the attempt."""
        return self.path / "start"

    def start(self) -> StartRecord | None:
        """Return the start of a job that uses the attempt; None before any job has started."""
        return find_record(self.start_directory / START_FILE, StartRecord)

    def end(self) -> EndRecord | None:
        """Return how the attempt ended; None if it has not ended."""
        return find_record(self.path / "end.json", EndRecord)

    def record_end(self, end: EndRecord) -> None:
        durable.write_json(self.path / "end.json", msgspec.to_builtins(end))

    def state(self, process: str, kind: type[R]) -> R | None:
        """Return the state that a process recorded; None if there is no readable file."""
        return find_record(self.path / "state" / f"{process}.json", kind)


class RunDirectory:
    """One run: `<runs>/<name>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def exists(self) -> bool:
        try:
            return files.is_file(self.path / "lock.json")
        except OSError as error:  # no permission, or an invalid file name
            if files.is_transient(error):
                raise
            return False

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path, number)

    def attempts(self) -> list[Attempt]:
        """Return all attempts that have a plan, oldest first."""
        paths = files.settled_listing(self.path / "attempts")
        numbers = [int(path.name) for path in paths if path.name.isdecimal() and files.is_file(path / "plan.json")]
        return [self.attempt(number) for number in sorted(numbers)]

    def latest(self) -> Attempt:
        """Return the newest attempt that has a plan. Raises RunError if there is none."""
        attempts = self.attempts()
        if not attempts:
            raise RunError(f"{self.path} has no attempt")
        return attempts[-1]

    def lock(self) -> LockRecord:
        """Return lock.json: identity of the run, and versions of its software. Empty if it cannot be read."""
        return find_record(self.path / "lock.json", LockRecord) or LockRecord()

    def recipe(self) -> RunRecipe:
        """Return the recipe fields that status and reports need; defaults if the file cannot be read."""
        return find_record(self.path / recipe_record.FILE, RunRecipe) or RunRecipe()

    @property
    def created_at(self) -> float:
        """Unix time of creation; 0 if unknown."""
        return self.lock().created_at

    def job_output(self, job_id: str) -> Path:
        """Return the output file of a job's batch script, srun and agents."""
        return self.path / JOB_OUTPUT.format(job_id)

    @property
    def run_id(self) -> str:
        return self.lock().run_id or self.name


def name_in_use(run_dir: Path) -> list[Violation]:
    """Return a violation if the path exists and is not an empty directory."""
    if files.is_dir(run_dir) and not files.listing(run_dir):
        return []
    return [_in_use(run_dir)] if files.retrying(run_dir, lambda: os.path.lexists(run_dir)) else []


def _in_use(run_dir: Path) -> Violation:
    alternative = ""
    if RunDirectory(run_dir).exists():
        alternative = f", or `primeslurm resume {run_dir.name}` to continue the run"
    elif was_never_submitted(run_dir):
        alternative = f", or remove the directory: {UNFINISHED}"
    fix = f"choose another name with `--name`{alternative}"
    return Violation("name", run_dir.name, f"is in use: {run_dir} exists", fix)


def was_never_submitted(run_dir: Path) -> bool:
    """True if the submission of a run was interrupted: it has attempts, but neither a lock file nor a job."""
    run = RunDirectory(run_dir)
    jobs = [attempt.job() for attempt in run.attempts()]
    return files.is_dir(run_dir / "attempts") and not run.exists() and not any(job and job.job_id for job in jobs)


def missing_variables(plan: Plan) -> list[Violation]:
    """Return a violation for each variable of `pass_env` that is not set in this environment."""
    return [
        Violation("pass_env", name, "is not set where you submit", f"export {name}=...")
        for name in plan.pass_env
        if name not in os.environ
    ]


def create(recipe: Recipe, plan: Plan, source: Path | None, job: JobRecord | None = None) -> Attempt:
    """Create the run directory with its first attempt and a copy of the recipe file `source`.

    Without a `source`, as for a calibration, the directory holds no recipe.

    Raises:
        UsageError: the name is in use, or other users could replace the directory.
        OSError: the directory cannot be written. Nothing is left of it.
    """
    run_dir = Path(plan.run_dir)
    if problems := name_in_use(run_dir) + permission_problems(run_dir):
        raise UsageError(problems)
    resolved = recipe.model_dump_json(by_alias=True, indent=2)
    lock = _lock(recipe.name, resolved, plan)  # slowest step, so it comes before the first write
    durable.make_directory(run_dir, mode=0o700)
    if problems := permission_problems(run_dir):  # another user was faster, or an ACL changed the mode
        raise UsageError(problems)
    try:
        files.retrying(run_dir, (run_dir / "attempts").mkdir)  # only one of two submissions wins
    except FileExistsError:
        raise UsageError([_in_use(run_dir)]) from None
    try:
        return _fill(run_dir, resolved, lock, plan, source, job)
    except OSError as error:
        files.remove_tree(run_dir, ignore_errors=True)
        raise OSError(error.errno, error.strerror, error.filename or str(run_dir)) from error


def discard(attempt: Attempt) -> None:
    """Remove an attempt that has no job. The first attempt is removed with its whole run."""
    first = attempt.number == 1
    files.remove_tree(attempt.path.parents[1] if first else attempt.path, ignore_errors=True)


def _fill(
    run_dir: Path, resolved: str, lock: LockRecord, plan: Plan, source: Path | None, job: JobRecord | None
) -> Attempt:
    files.retrying(run_dir, lambda: run_dir.chmod(0o700))  # also if an empty directory existed
    secret.create(run_dir)
    if source is not None:
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
