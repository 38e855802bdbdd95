"""Local directories that no other user can create first or replace."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from primeslurm.base.private_directory import PrivateDirectory, is_abandoned, random_word
from primeslurm.node.agent.node_agent import NodeAgent
from primeslurm.node.agent.node_context import directory_of, remove_leftovers
from primeslurm.node.preflight.checks import socket_checks
from primeslurm.plan.model import Plan
from primeslurm.run.directory import RunDirectory
from tests.support.plans import plan_of
from tests.support.strangers import STRANGER, attempted, needs_second_user, public_directory, stranger

NAME = "primeslurm-r-1-2-a0-"


def test_only_the_owner_has_access_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = PrivateDirectory(tmp_path / "deep" / "x")
        tmp_path.chmod(0o700)
        (tmp_path / "deep").mkdir(mode=0o755)
        directory.make()
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert [path.name for path in directory.path.parent.iterdir()] == ["x"]
    finally:
        os.umask(before)
    directory.remove()
    assert not directory.path.exists()


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("x", "link", "dangling"):
        directory = PrivateDirectory(tmp_path / name)
        with pytest.raises(FileExistsError, match="is there already"):
            directory.make()
        directory.remove()
        assert os.path.lexists(tmp_path / name), "it is not removed either"


def test_a_parent_in_which_everybody_may_rename_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match=rf"not sticky \(mode 0777\).*chmod \+t {re.escape(str(tmp_path))}"):
        PrivateDirectory(tmp_path / "x").make()
    tmp_path.chmod(0o1777)
    PrivateDirectory(tmp_path / "x").make()


def test_only_unlocked_directories_are_abandoned(tmp_path: Path) -> None:
    used = PrivateDirectory(tmp_path / "used")
    used.make()
    (tmp_path / "left").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "left")
    assert {name for name in ("used", "left", "link", "none") if is_abandoned(tmp_path / name)} == {"left"}


def test_leftovers_of_ended_agents_of_this_run_are_removed(tmp_path: Path) -> None:
    running = PrivateDirectory(tmp_path / "primeslurm-r-1-1-a1-bbbbbb")
    running.make()
    for name in (
        "primeslurm-r-1-1-a0-aaaaaa",
        "primeslurm-r-1-1-a2",
        "primeslurm-r-1-3-a0-aaaaaa",
        "primeslurm-r-2-1-a0",
        ".primeslurm-r-1-1-a0-cccccc",
        ".primeslurm-r-1-3-a0-cccccc",
    ):
        (tmp_path / name).mkdir()
    remove_leftovers(directory_of(tmp_path, "r-1", 2, 0, random_word()))
    left = {path.name for path in tmp_path.iterdir()}
    of_others = {"primeslurm-r-1-3-a0-aaaaaa", "primeslurm-r-2-1-a0", ".primeslurm-r-1-3-a0-cccccc"}
    assert left == {"primeslurm-r-1-1-a1-bbbbbb", *of_others}


@pytest.mark.parametrize("parent", ["/tmp", "/tmp/ps_k3x9q2ab", "/scratch/slurm/job.12345678"])
def test_sockets_of_the_longest_run_fit_below_it(parent: str) -> None:
    directory = directory_of(Path(parent), "r" * 63 + "-12345678", 99, 9999, random_word())
    socket = directory / "01234567-89ab-cdef-0123-456789abcdef"  # as vLLM names its sockets
    assert len(str(socket)) <= 107 and "-12345678-99-a9999-" in directory.name
    assert not socket_checks(directory)


def test_a_temporary_directory_too_long_for_sockets_fails_preflight() -> None:
    parent = Path("/scratch", "s" * 40)
    directory = directory_of(parent, "r" * 63 + "-12345678", 99, 9999, random_word())
    (found,) = socket_checks(directory)
    assert found.level == "failed" and found.text.startswith(f"{parent} is 16 characters too long")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], NodeAgent]:
    def make(tmp: Path) -> NodeAgent:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp))
        monkeypatch.setattr("primeslurm.node.agent.node_agent.own_address", lambda *_: "127.0.0.1")
        plan: Plan = plan_of(tmp_path / "run", ())
        attempt = RunDirectory(Path(plan.run_dir)).attempt(2)
        attempt.prepare(plan)
        return NodeAgent(plan, 0, attempt, "r-1", plan.python)

    return make


@needs_second_user
def test_another_user_cannot_make_an_agents_directory_first(
    agent: Callable[[Path], NodeAgent],
) -> None:
    with public_directory() as tmp, public_directory() as target:

        def attack() -> None:
            for name in (NAME[:-1], NAME, *(f"{NAME}{letter * 6}" for letter in "abcdefgh")):
                (tmp / name).mkdir(mode=0o777)
                (tmp / name / "vllm").symlink_to(target)

        assert attempted(attack).succeeded
        ours = agent(tmp)
        ours._directory.make()
        status = ours.tmp.lstat()
        assert stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not any(ours.tmp.iterdir())
        assert not attempted(lambda: (ours.tmp / "vllm").symlink_to(target)).succeeded
        assert attempted(lambda: ours.tmp.rename(tmp / "aside") and None).error == "PermissionError"
        assert attempted(lambda: len(list(ours.tmp.iterdir()))).error == "PermissionError"
        ours._directory.remove()
        assert {path.lstat().st_uid for path in tmp.iterdir()} == {STRANGER}, "directories of other users stay"


@needs_second_user
def test_clean_up_ignores_links_of_another_user(tmp_path: Path) -> None:
    with public_directory() as tmp:
        (tmp_path / "mine").mkdir()

        def attack() -> None:
            (tmp / "primeslurm-r-1-1-a0-aaaaaa").symlink_to(tmp_path / "mine")
            (tmp / "primeslurm-r-1-1-a1-aaaaaa").mkdir()
            os.mkfifo(tmp / "primeslurm-r-1-1-a2-aaaaaa")

        assert attempted(attack).succeeded
        (tmp / "primeslurm-r-1-1-a3-aaaaaa").mkdir()
        remove_leftovers(tmp / "primeslurm-r-1-2-a0-aaaaaa")
        assert (tmp_path / "mine").is_dir()
        assert not (tmp / "primeslurm-r-1-1-a3-aaaaaa").exists()


@needs_second_user
def test_a_lock_of_another_user_stops_nothing(agent: Callable[[Path], NodeAgent]) -> None:
    def attack() -> None:
        import fcntl

        (tmp / "primeslurm-r-1-1-a0-aaaaaa").mkdir()
        fcntl.flock(os.open(tmp / "primeslurm-r-1-1-a0-aaaaaa", os.O_RDONLY), fcntl.LOCK_EX)

    with public_directory() as tmp, stranger(attack) as done:
        assert done.succeeded
        ours = agent(tmp)
        remove_leftovers(ours.tmp)
        ours._directory.make()
        ours._directory.remove()
