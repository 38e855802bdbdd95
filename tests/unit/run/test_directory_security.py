"""Ownership and permissions of run directories."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.run.directory import create
from primeslurm.run.directory_security import permission_problems, pickle_problems
from tests.support.recipes import site, write_recipe
from tests.support.strangers import STRANGER, attempted, needs_second_user, public_directory


@pytest.fixture
def runs() -> Iterator[Path]:
    """A directory of runs that several users share, as /tmp is."""
    with public_directory() as path:
        yield path


def made(tmp_path: Path, run_dir: Path) -> Plan:
    source = write_recipe(tmp_path / "r.yaml")
    recipe = load_recipe(source)
    plan = derive(recipe, site(), run_dir)
    create(recipe, plan, source)
    return plan


def reasons(run_dir: Path) -> list[str]:
    return [violation.why for violation in permission_problems(run_dir)]


def test_world_writable_parent_is_refused_with_a_fix(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (violation,) = permission_problems(shared / "runs" / "r")
    assert str(shared) in violation.why and violation.fix.startswith(f"chmod +t {shared}")
    with pytest.raises(UsageError, match="sticky bit"):
        made(tmp_path, shared / "runs" / "r")
    assert not (shared / "runs").exists()
    shared.chmod(0o1777)
    assert permission_problems(shared / "runs" / "r") == []


def test_own_empty_directory_is_used_and_gets_mode_0700(tmp_path: Path, runs: Path) -> None:
    (runs / "r").mkdir()
    (runs / "r").chmod(0o777)
    made(tmp_path, runs / "r")
    assert (runs / "r").stat().st_mode & 0o777 == 0o700
    assert permission_problems(runs / "r") == []
    (runs / "r").chmod(0o775)
    assert "is writable by other users (mode 0775)" in reasons(runs / "r")[0]


@needs_second_user
def test_directory_of_another_user_is_refused(tmp_path: Path, runs: Path) -> None:
    """If an empty directory that is open to all were used, its owner could read the secret in it."""

    def attack() -> None:
        (runs / "r").mkdir()
        (runs / "r").chmod(0o777)
        (runs / "link").symlink_to(tmp_path)

    assert attempted(attack).succeeded
    with pytest.raises(UsageError, match=f"belongs to user {STRANGER}"):
        made(tmp_path, runs / "r")
    assert not any((runs / "r").iterdir())
    assert reasons(runs / "link") == [f"{runs / 'link'} is a link that belongs to user {STRANGER}"]


EVIL = "import pathlib; pathlib.Path({!r}).touch()"


class Payload:
    """Code that runs on unpickling."""

    def __init__(self, target: Path) -> None:
        self.code = EVIL.format(str(target))

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (self.code,)


def load(folder: Path) -> subprocess.CompletedProcess[str]:
    """Load the pickle as a node of the job does."""
    env = {**os.environ, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    argv = [sys.executable, "-m", "primeslurm.node.start_agent", str(folder), "w"]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)


@needs_second_user
def test_pickle_in_a_replaced_run_directory_is_not_loaded(tmp_path: Path) -> None:
    payload = pickle.dumps(Payload(tmp_path / "ran"))

    def swap(runs: Path) -> None:
        if (runs / "r").exists():
            (runs / "r").rename(runs / "aside")
        (runs / "r" / "submitit").mkdir(parents=True)
        (runs / "r" / "submitit" / "7_submitted.pkl").write_bytes(payload)
        (runs / "r").chmod(0o755)

    with public_directory(0o777) as runs:
        (runs / "r").mkdir(mode=0o700)
        assert attempted(lambda: swap(runs)).succeeded, "the parent lets them"
        done = load(runs / "r" / "submitit")
        assert done.returncode == 1 and f"{runs / 'r'} belongs to user {STRANGER}" in done.stderr
        assert not (tmp_path / "ran").exists()
    with public_directory() as runs:
        (runs / "r" / "submitit").mkdir(parents=True)
        (runs / "r").chmod(0o700)
        assert attempted(lambda: swap(runs)).error == "PermissionError"
        (runs / "r" / "submitit" / "7_submitted.pkl").write_bytes(payload)
        load(runs / "r" / "submitit")
        assert (tmp_path / "ran").exists(), "one's own is"


@needs_second_user
def test_pickles_must_belong_to_this_user_and_be_closed_to_others(runs: Path) -> None:
    folder = runs / "r" / "submitit"
    folder.mkdir(parents=True)
    own, theirs = folder / "7_submitted.pkl", folder / "8_submitted.pkl"
    own.touch()
    own.chmod(0o664)
    folder.chmod(0o775)
    (runs / "r").chmod(0o700)
    assert pickle_problems(folder) == "", "nobody else gets there"
    (runs / "r").chmod(0o755)
    assert pickle_problems(folder).count("is writable by other users") == 2
    folder.chmod(0o755)
    own.chmod(0o644)
    assert pickle_problems(folder) == ""
    theirs.touch()
    os.chown(theirs, STRANGER, STRANGER)
    assert pickle_problems(folder) == f"{theirs} belongs to user {STRANGER}"
    assert pickle_problems(runs / "none" / "submitit").endswith("No such file or directory")
