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


def test_no_garbage_is_looked_for_within_and_nothing_of_it_after() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_it_is_looked_for_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_the_outermost_one_ends_it() -> None:
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
