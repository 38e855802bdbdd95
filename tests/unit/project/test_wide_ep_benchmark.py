"""The benchmark of wide expert parallelism, as far as possible without GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.wide_ep import CELLS, recipe
from primeslurm.plan.commands.engine import ALONE, DataParallel, Engines


@pytest.mark.parametrize("cell", CELLS)
def test_engines_of_a_cell_are_started_as_it_says(cell: str, tmp_path: Path) -> None:
    size, _, backend = cell.partition("-")
    engines = Engines(recipe(tmp_path, "bfloat16", cell, 64), "cuda", "engine", "python")
    argv = list(engines.command(DataParallel(int(size), 1, "rank-0") if backend else ALONE).argv)
    given = {name: argv[argv.index(name) + 1] for name in argv if name.startswith("--") and name != argv[-1]}
    assert given.get("--all2all-backend", "") == backend
    assert given.get("--data-parallel-size", "1") == size
    graphs = json.loads(given["--compilation-config"])["cudagraph_mode"]
    assert graphs == ("NONE" if backend == "deepep_high_throughput" else "FULL_DECODE_ONLY")
