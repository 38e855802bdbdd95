"""Caches of compiled code between attempts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from primeslurm.base import compiled_code


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled_code.VARIABLE, str(tmp_path))
    for name in compiled_code.DIRECTORIES:
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what a test sets
        monkeypatch.delenv(name)


def kept(tmp_path: Path) -> Path:
    return tmp_path / f"primeslurm-compiled-{os.geteuid()}"


def test_next_attempt_reuses_compiled_code(tmp_path: Path) -> None:
    compiled_code.use()
    first = [os.environ.pop(name) for name in compiled_code.DIRECTORIES]
    assert kept(tmp_path).stat().st_mode & 0o777 == 0o700
    assert len(set(first)) == len(first)
    assert all(place.startswith(str(kept(tmp_path))) for place in first)
    compiled_code.use()
    assert [os.environ[name] for name in compiled_code.DIRECTORIES] == first


@pytest.mark.parametrize("fault", ["open", "link", "file", "swappable"])
def test_unsafe_cache_directory_is_not_used(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    place = kept(tmp_path)
    if fault == "open":
        place.mkdir()
        place.chmod(0o770)
    elif fault == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "other")
    elif fault == "file":
        place.touch()
    else:
        tmp_path.chmod(0o777)
    compiled_code.use()
    assert not any(name in os.environ for name in compiled_code.DIRECTORIES)
    assert len(caplog.records) == 1


def test_variables_of_the_site_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/its/own")
    compiled_code.use()
    assert os.environ["TRITON_CACHE_DIR"] == "/its/own"


def test_plan_without_a_cache_directory_creates_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled_code.VARIABLE)
    compiled_code.use()
    assert not any(name in os.environ for name in compiled_code.DIRECTORIES) and not list(tmp_path.iterdir())
