"""Committed checkpoints and published weights that a node does not see yet, or reads wrongly once."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from primeslurm.base import files
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.stored.checkpoints import COMMITTED, NEWEST, NotVisibleError
from primeslurm.wire.weight_transfer import filesystem
from tests.support.faulty_storage import FakeTime, FaultyStorage, once

PART, SHARD = "trainer/part", "trainer/__0_0.distcp"


def commit(run: Path, step: int) -> Path:
    directory = checkpoints.step_dir(run, step)
    (directory / "trainer").mkdir(parents=True)
    (directory / PART).write_text(f"part of {step}")
    (directory / SHARD).write_text(f"shard of {step}")
    checkpoints.commit(directory, step, attempt=1)
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (76, 78, 80):
        commit(tmp_path, step)
    return tmp_path


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


WHOLE = [NEWEST, "step_000076", "step_000078", "step_000080"]


@pytest.fixture
def hiding(run: Path, storage_time: FakeTime) -> Callable[[str, float], FaultyStorage]:
    """Hide a name from this node for this many seconds."""

    def hide(name: str, seconds: float) -> FaultyStorage:
        storage, until = FaultyStorage(run), storage_time.now + seconds

        def rule(operation: str, path: str) -> None:
            storage.hidden = {name} if storage_time.now < until else set()

        storage.fail = rule
        rule("", "")
        return storage

    return hide


@pytest.mark.parametrize("name", ["step_000080", COMMITTED, "part", "__0_0.distcp", "trainer"])
@pytest.mark.parametrize("seconds", [0.01, 5.0, 45.0])
def test_checkpoint_visible_a_moment_later_is_undamaged(
    name: str, seconds: float, run: Path, hiding: Callable[[str, float], FaultyStorage]
) -> None:
    with hiding(name, seconds).installed():
        assert checkpoints.set_damaged_aside(run, 7) == 80
    assert names(run) == WHOLE


@pytest.mark.parametrize("name", ["step_000080", COMMITTED, "part", "__0_0.distcp", "trainer"])
def test_invisible_checkpoint_ends_the_attempt_without_a_rename(
    name: str, run: Path, hiding: Callable[[str, float], FaultyStorage]
) -> None:
    with hiding(name, 1e9).installed():
        for look in (lambda: checkpoints.set_damaged_aside(run, 7), lambda: checkpoints.newest_whole(run)):
            with pytest.raises(NotVisibleError, match=r"not visible from this node within 60 s.*nothing was renamed"):
                look()
    assert names(run) == WHOLE
    assert checkpoints.set_damaged_aside(run, 7) == 80, "the next attempt sees it"


def test_newest_is_found_without_a_listing(run: Path) -> None:
    storage = FaultyStorage(run)

    def rule(operation: str, path: str) -> None:
        storage.hidden = {"step_000080"} if operation == "listdir" else set()

    storage.fail = rule
    with storage.installed():
        assert checkpoints.set_damaged_aside(run, 7) == checkpoints.newest_whole(run) == checkpoints.newest(run) == 80
        assert checkpoints.prune(run, 1) in ([], [76])
    assert {"step_000078", "step_000080"} <= set(names(run))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda directory: (directory / PART).write_text("part of 81"), "differs from its record"),
        (lambda directory: (directory / PART).write_text("part"), "4 bytes instead of 10"),
        (lambda directory: (directory / SHARD).write_text(""), "0 bytes instead of 11"),
        (lambda directory: (directory / COMMITTED).write_bytes(b'{"step": 80, "par'), "is no manifest"),
        (lambda directory: (directory / COMMITTED).write_bytes(b""), "is no manifest"),
    ],
    ids=["content", "part cut short", "shard cut short", "manifest", "empty manifest"],
)
def test_damaged_checkpoint_is_set_aside_with_its_reason(
    damage: Callable[[Path], object], words: str, run: Path, storage_time: FakeTime
) -> None:
    damage(checkpoints.step_dir(run, 80))
    told: list[tuple[int, str, Path]] = []
    assert checkpoints.set_damaged_aside(run, 7, lambda *each: told.append(each)) == 78
    assert sum(storage_time.pauses) >= files.CACHE_S, "after caches have expired"
    aside = run / "checkpoints" / "step_000080.damaged-7"
    assert names(run) == [NEWEST, "step_000076", "step_000078", aside.name, f"{aside.name}.txt"]
    assert words in (reason := aside.with_name(f"{aside.name}.txt").read_text())
    assert checkpoints.set_asides(run) == [f"{aside} was set aside: {reason.splitlines()[0]}"]
    assert told == [(80, reason.strip().replace("\n", "; "), aside)]
    assert checkpoints.newest_whole(run) == 78 and (run / "checkpoints" / NEWEST).read_text() == "78\n"


def test_content_that_differs_once_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []
    real, fadvise, path = files.read_bytes, os.posix_fadvise, checkpoints.step_dir(run, 80) / COMMITTED

    def stale(asked: Path) -> bytes:
        return real(asked) if str(asked) in dropped or asked != path else b"{}"

    def drop(handle: int, *arguments: int) -> None:
        dropped.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fadvise(handle, *arguments)

    monkeypatch.setattr(files, "read_bytes", stale)
    monkeypatch.setattr(os, "posix_fadvise", drop)
    assert checkpoints.set_damaged_aside(run, 7) == 80
    assert str(path) in dropped and names(run) == WHOLE


def test_setting_aside_needs_a_reason(run: Path) -> None:
    with pytest.raises(ValueError, match="nothing proves"):
        checkpoints.set_aside(run, 80, 7, [])
    assert names(run) == WHOLE


def test_error_explains_a_removed_checkpoint(run: Path) -> None:
    shutil.rmtree(checkpoints.step_dir(run, 80))
    with pytest.raises(NotVisibleError, match=r"If the checkpoint was removed on purpose, remove that file, too"):
        checkpoints.newest_whole(run)
    (run / "checkpoints" / NEWEST).unlink()
    assert checkpoints.newest_whole(run) == 78


def test_cleared_step_is_not_waited_for(run: Path) -> None:
    checkpoints.clear(checkpoints.step_dir(run, 80))
    assert checkpoints.newest_whole(run) == 78, "the rank was killed before it committed the checkpoint again"


def test_pruning_with_an_incomplete_listing_keeps_checkpoints(run: Path) -> None:
    for missed in ("step_000076", "step_000078", "step_000080"):
        storage = FaultyStorage(run, hidden={missed})
        with storage.installed():
            assert checkpoints.prune(run, 2) in ([], [76])
        assert {"step_000078", "step_000080"} <= set(names(run))


def test_checkpoint_with_a_late_commit_is_kept(run: Path) -> None:
    storage = FaultyStorage(run)
    hidden = once(errno.ENOENT, operations=("open",), names="step_000078/COMMITTED")
    storage.fail = hidden
    with storage.installed():
        assert checkpoints.prune(run, 2) == []
        assert checkpoints.prune(run, 2) == [76]
    assert names(run) == [NEWEST, "step_000078", "step_000080"]


def test_needed_steps_are_kept_without_a_visible_commit(run: Path) -> None:
    unseen = FaultyStorage(run, lambda o, path: errno.ENOENT if path.startswith("checkpoints/step_000076/") else None)
    with unseen.installed():
        assert checkpoints.prune(run, 1, {76}) == [78]
    assert checkpoints.committed(run) == [76, 80]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ESHUTDOWN])
def test_restore_survives_repeated_failures_of_each_call(number: int, run: Path) -> None:
    with FaultyStorage(run, once(number, number)).installed():
        assert checkpoints.set_damaged_aside(run, 7) == 80
        assert checkpoints.newest(run) == 80
        assert checkpoints.damage(checkpoints.step_dir(run, 80)) == []
    assert names(run) == WHOLE


def test_failed_listing_prevents_a_commit(tmp_path: Path) -> None:
    directory = checkpoints.step_dir(tmp_path, 2)
    (directory / "trainer").mkdir(parents=True)
    (directory / PART).write_text("part")
    unlisted = FaultyStorage(tmp_path, lambda o, path: errno.EIO if path.endswith("trainer") else None)
    with unlisted.installed(), pytest.raises(OSError, match="Input/output"):
        checkpoints.commit(directory, 2, 1)
    assert checkpoints.committed(tmp_path) == []
    assert [part.name for part in checkpoints.commit(directory, 2, 1).parts] == [PART]


def publish(run: Path, version: int) -> Path:
    directory = filesystem.version_dir(run, version)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"x")
    filesystem.complete(directory, version, "bfloat16")
    return directory


def test_needed_weights_are_kept_without_a_visible_manifest(tmp_path: Path) -> None:
    for version in range(1, 5):
        publish(tmp_path, version)
    unseen = FaultyStorage(tmp_path, lambda o, path: errno.ENOENT if path == "weights/v000002/MANIFEST.json" else None)
    with unseen.installed():
        assert filesystem.prune(tmp_path, keep=1, needed={2}) == [1, 3]
    assert filesystem.published(tmp_path) == [2, 4]


def test_weights_with_a_late_manifest_are_kept(tmp_path: Path) -> None:
    for version in range(1, 4):
        publish(tmp_path, version)
    rule = once(errno.ENOENT, operations=("stat",), names="v000002/MANIFEST.json")
    with FaultyStorage(tmp_path, rule).installed():
        assert filesystem.prune(tmp_path, keep=2, needed=set()) == []
    assert filesystem.published(tmp_path) == [1, 2, 3]
