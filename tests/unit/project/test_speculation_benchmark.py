"""The benchmark of speculative decoding, as far as possible without GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speculation import CELLS, DRAFTERS, recipe
from primeslurm.plan.commands.command import Device
from primeslurm.plan.commands.engine import Engines


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("cell", CELLS)
def test_engines_of_a_cell_draft_as_it_says(cell: str, device: Device, tmp_path: Path) -> None:
    argv = list(
        Engines(recipe(cell, tmp_path, tmp_path, device, False, 64, 128), device, "engine", "python").command().argv
    )
    model, _, drafter = cell.partition("-")
    assert ("--enable-return-routed-experts" in argv) == (model != "smollm2")
    assert ("--speculative-config" in argv) == bool(drafter)
    if drafter:
        given = json.loads(argv[argv.index("--speculative-config") + 1])
        expected = dict(DRAFTERS[model][drafter])
        expected |= {"model": str(tmp_path)} if expected["method"] == "eagle" else {}
        assert given == {"num_speculative_tokens": expected.pop("num_tokens"), **expected}
