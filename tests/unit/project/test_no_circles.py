"""Modules do not import each other in a circle, not even within functions."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_modules_can_be_read_from_the_bottom_up() -> None:
    graph = grimp.build_graph("primeslurm", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert imports["primeslurm.trainer.assembly.build"], "imports were found"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
