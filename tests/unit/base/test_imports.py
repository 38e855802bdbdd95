"""Imports without garbage collection, which is enabled again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from primeslurm.base.imports import uncollected


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    gc.enable()


def test_imports_run_without_garbage_collection() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_collection_resumes_after_a_failed_import() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_collection_resumes_after_the_outermost_block() -> None:
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
