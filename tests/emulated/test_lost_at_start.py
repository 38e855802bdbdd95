"""Whole emulated runs that lose a node between its assignment and its start. Agents are threads of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primeslurm.api.sites import with_python
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import emulate
from primeslurm.recipe import Recipe
from primeslurm.records.events.nodes import AgentFailed, ProcessesGivenUp
from primeslurm.records.fleet import Outcome
from primeslurm.run.directory import create
from primeslurm.run.history import rows
from tests.support.fake_engine import write_tokenizer
from tests.support.recipes import recipe_data, site
from tests.unit.node.test_lost_at_start import Start, start  # noqa: F401 - a fixture

STEPS = 2
DECODE = {"type": "disaggregated", "prefill": {"gpus_per_node": 1}, "decode": {"gpus_per_node": 1, "num_replicas": 2}}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("lost", "inference", "given_up"),
    [
        (4, DECODE, ["decode-r0-1"]),
        (3, {"type": "multi_node", "gpus_per_node": 1, "num_replicas": 2}, ["engine-r1-0", "router-1"]),
    ],
    ids=["decode", "replica"],
)
def test_a_run_starts_without_engines_that_were_lost(
    start: Start,  # noqa: F811
    tmp_path: Path,
    lost: int,
    inference: dict[str, Any],
    given_up: list[str],
) -> None:
    model = str(write_tokenizer(tmp_path / "model"))
    deployment = {"train": {"gpus_per_node": 1}, "inference": inference}
    recipe = Recipe.model_validate(recipe_data(max_steps=STEPS, model={"path": model}, deployment=deployment))
    plan = emulate(derive(recipe, with_python(site(device="cpu")), tmp_path / "run"))
    plan = plan.model_copy(update={"executor": "local"})
    (tmp_path / "r.yaml").write_text("# made by a test\n")
    create(recipe, plan, tmp_path / "r.yaml")
    running = start(plan, lost)
    assert running.ended().outcome is Outcome.COMPLETED
    assert [event.processes for event in running.events(ProcessesGivenUp)] == [given_up]
    assert not running.events(AgentFailed)
    assert [row["step"] for row in rows(running.run.path)] == list(range(1, STEPS + 1))
