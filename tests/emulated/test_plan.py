"""An emulated plan is the real one but for the modules that are started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from primeslurm.plan.derive import derive
from primeslurm.plan.emulate import STAND_INS, emulate
from primeslurm.recipe import Recipe
from tests.support.recipes import recipe_data, site


def test_only_the_modules_of_stand_ins_differ() -> None:
    shape = {
        "deployment": {"inference": {"type": "disaggregated", "num_replicas": 2}},
        "inference": {"kv_offload": {"type": "mooncake", "cpu": {"bytes": 2**30}}},
    }
    real = derive(Recipe.model_validate(recipe_data(**shape)), site(), Path("/shared/runs/x"))
    emulated = emulate(real)
    fields = {"argv"}
    for mine, theirs in zip(emulated.processes(), real.processes(), strict=True):
        assert mine.model_dump(exclude=fields) == theirs.model_dump(exclude=fields)
        differing = [(a, b) for a, b in zip(mine.argv, theirs.argv, strict=True) if a != b]
        assert [a for a, _ in differing] == ([STAND_INS[mine.role]] if mine.role in STAND_INS else [])
    assert emulated.emulated and not real.emulated
    without = {"nodes", "emulated"}
    assert emulated.model_dump(exclude=without) == real.model_dump(exclude=without)
    assert [node.model_dump(exclude={"processes"}) for node in emulated.nodes] == [
        node.model_dump(exclude={"processes"}) for node in real.nodes
    ]
    roles = {process.role for process in real.processes()}
    assert roles - STAND_INS.keys() == {"orchestrator", "router"}, "these run for real"


def test_every_stand_in_exists_and_says_what_it_is() -> None:
    for module in STAND_INS.values():
        assert "emulated" in module and importlib.util.find_spec(module)
