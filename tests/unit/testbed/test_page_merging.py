"""Page merging for emulated runs: processes request it, and have equal pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.api.recipes import emulation
from primeslurm.api.recipes.loading import load
from primeslurm.base.errors import UsageError
from primeslurm.plan.stand_ins import memory_mib
from primeslurm.recipe import Recipe
from primeslurm.testbed.embedded_slurm import page_merging
from tests.support.kernels import merges_pages
from tests.support.recipes import recipe_data
from tests.support.unmeasured import unmeasured

LAYOUT = "import json, sys; print(id(json), id(sys.modules), hash('word'))"


@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the kernel's switch by a file."""
    monkeypatch.setattr(page_merging, "SWITCH", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.skipif(not merges_pages(), reason="the kernel has no PR_SET_MEMORY_MERGE")
def test_processes_with_page_merging_have_equal_pages() -> None:
    # coverage would begin with data that differs between processes
    argv, env = [sys.executable, "-c", LAYOUT], unmeasured()
    same = env | page_merging.SAME_HASHES
    merging = {subprocess.check_output(argv, env=same, preexec_fn=page_merging.ask) for _ in range(3)}
    assert len(merging) == 1
    usual = {subprocess.check_output(argv, env=env) for _ in range(3)}
    assert len(usual) == 3, "usually addresses and hashes are random"


@pytest.mark.parametrize(("says", "merged"), [("1\n", True), ("0\n", False), ("2\n", False), (None, False)])
def test_cluster_requests_page_merging_if_enabled(says: str | None, merged: bool, switch: Path) -> None:
    if says is not None:
        switch.write_text(says)
    spec = emulation.cluster_for(Recipe.model_validate(recipe_data()))
    assert spec.merge_pages is merged
    assert emulation.site_of(spec).env == (page_merging.SAME_HASHES if merged else {})


def test_more_fits_where_the_kernel_merges() -> None:
    plan = load(Path(__file__).parents[2] / "emulated" / "small.yaml", emulate=True).plan()
    needed = memory_mib(plan)
    emulation.refuse_too_large(plan, needed - 1, merged=True)
    with pytest.raises(UsageError, match="nodes would fit"):
        emulation.refuse_too_large(plan, needed - 1)
