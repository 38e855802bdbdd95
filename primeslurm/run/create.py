"""Make a run directory: the recipe as given and as resolved, and a lock file of what it will run with."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from primeslurm import durable
from primeslurm.errors import UsageError, Violation
from primeslurm.files import write_atomic
from primeslurm.paths import is_dir
from primeslurm.plan.model import Plan
from primeslurm.recipe import Recipe
from primeslurm.records.attempt import LockRecord
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.versions import installed_packages
from primeslurm.wire import secret


def name_in_use(run_dir: Path) -> list[Violation]:
    """Return a violation if the run directory holds anything already, or is no directory."""
    if is_dir(run_dir) and not any(run_dir.iterdir()):
        return []
    return [_in_use(run_dir)] if os.path.lexists(run_dir) else []


def _in_use(run_dir: Path) -> Violation:
    resumable = f", or `primeslurm resume {run_dir.name}` to go on with it" if RunDirectory(run_dir).exists() else ""
    return Violation("name", run_dir.name, f"is in use: {run_dir} exists", f"`--name` another{resumable}")


def missing_variables(plan: Plan) -> list[Violation]:
    """Return a violation for each variable that processes need and that is not set here, where its value comes from."""
    return [
        Violation("pass_env", name, "is not set where you submit", f"export {name}=...")
        for name in plan.pass_env
        if name not in os.environ
    ]


def create(recipe: Recipe, plan: Plan, source: Path) -> Attempt:
    """Create the run directory with its first attempt, or nothing.

    Args:
        recipe: as it was resolved.
        plan: of the first attempt.
        source: the recipe's file, of which a copy is kept.

    Raises:
        UsageError: the name is in use.
        OSError: it cannot be written.
    """
    run_dir = Path(plan.run_dir)
    if problems := name_in_use(run_dir):
        raise UsageError(problems)
    durable.make_directory(run_dir, mode=0o700)
    try:
        (run_dir / "attempts").mkdir()  # of several who submit a name at once, one makes it
    except FileExistsError:
        raise UsageError([_in_use(run_dir)]) from None
    try:
        return _fill(run_dir, recipe, plan, source)
    except OSError as error:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise OSError(error.errno, error.strerror, error.filename or str(run_dir)) from error


def discard(attempt: Attempt) -> None:
    """Remove an attempt that nothing runs; the first one with its whole run."""
    first = attempt.number == 1
    shutil.rmtree(attempt.path.parents[1] if first else attempt.path, ignore_errors=True)


def _fill(run_dir: Path, recipe: Recipe, plan: Plan, source: Path) -> Attempt:
    run_dir.chmod(0o700)  # one that was there, empty, too
    secret.create(run_dir)
    write_atomic(run_dir / "recipe.yaml", source.read_bytes())
    resolved = recipe.model_dump_json(by_alias=True, indent=2)
    write_atomic(run_dir / "recipe.resolved.json", resolved + "\n")
    attempt = RunDirectory(run_dir).attempt(1)
    attempt.prepare(plan)
    durable.sync(run_dir)
    durable.write_json(run_dir / "lock.json", msgspec.to_builtins(_lock(recipe.name, resolved, plan)))
    return attempt


def _lock(name: str, resolved: str, plan: Plan) -> LockRecord:
    return LockRecord(
        run_id=f"{name}-{secrets.token_hex(4)}",
        created_at=time.time(),
        recipe_hash=hashlib.blake2b(resolved.encode(), digest_size=16).hexdigest(),
        plan_hash=hashlib.blake2b(plan.to_json().encode(), digest_size=16).hexdigest(),
        python=sys.version.split()[0],
        packages=installed_packages(),
        git=_git_state(),
    )


def _git_state() -> str | None:
    """`git describe` of the checkout that primeslurm runs from; None outside one."""
    here = Path(__file__).resolve().parent
    argv = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
