"""Similar rows are folded without loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.cli.views.plan import every_row, folded_rows
from primeslurm.cli.views.tables import fold, ranges
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from tests.support.cli import primeslurm

ROOT = Path(__file__).resolve().parents[3]
SITE = ROOT / "sites" / "h200.yaml"
LARGE = ROOT / "recipes" / "glm5_pd.yaml"


@pytest.mark.parametrize(
    ("texts", "folded_texts"),
    [
        (["trainer-rank-0", "trainer-rank-1", "trainer-rank-2"], ["trainer-rank-0..2"]),
        (["router-0", "engine-r0-0", "engine-r0-1", "router-1"], ["router-0..1", "engine-r0-0..1"]),
        (["store-3", "store-1", "store-7"], ["store-[1, 3, 7]"]),
        (["orchestrator"], ["orchestrator"]),
        (["a1", "b1"], ["a1", "b1"]),
        (["env.07"], ["env.07"]),
    ],
)
def test_texts_that_differ_in_numbers_are_folded(texts: list[str], folded_texts: list[str]) -> None:
    assert fold(texts) == folded_texts


def test_many_ranges_become_first_last_and_count() -> None:
    assert ranges([5, 0, 1, 2, 9]) == "0..2, 5, 9"
    assert ranges(range(0, 20, 2)) == "0..18 (10)"


def test_placement_of_28_nodes_fits_a_screen() -> None:
    plan = derive(load_recipe(LARGE), load_site(SITE), Path("/shared/run"))
    folded, every = folded_rows(plan.nodes), every_row(plan.nodes)
    assert len(every) == len(plan.processes()) > 250
    assert len(folded) < 25
    rows = [(row.nodes, row.role, row.process, row.gpus) for row in folded]
    assert ("1", "train[0]", "trainer-rank-0", "0") in rows
    assert ("2..12", "train[1..11]", "trainer-rank-8..95", "0..7") in rows
    assert folded[0].nodes == "0"


def test_plan_shows_the_verdict_first_and_every_process_if_asked() -> None:
    shown = primeslurm("plan", str(LARGE), "--site", str(SITE), "--verbose", cwd=ROOT)
    assert shown.code == 0, shown.err
    assert len(shown.out.splitlines()) <= 110
    parts = ("28 GPU nodes (224 H200)", "totals: 34 nodes: 12 train, ", "memory of one GPU", "trainer-rank-8..95")
    assert sorted(parts, key=shown.out.index) == list(parts)
    every = primeslurm("plan", str(LARGE), "--site", str(SITE), "--all", cwd=ROOT)
    assert "trainer-rank-95 " in every.out and "trainer-rank-8.." not in every.out
