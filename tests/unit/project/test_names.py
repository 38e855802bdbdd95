"""No two public classes have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "primeslurm"
MIRRORED = {
    "Config": "torchtitan's convention: what a module is made from, within its class",
}
"""Names of several classes, and why."""


def classes() -> dict[str, list[str]]:
    """Return the modules by the names of their public classes."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(PACKAGE)))
    return modules


def test_public_class_names_are_unique() -> None:
    doubles = {name: modules for name, modules in classes().items() if len(modules) > 1}
    assert {name: modules for name, modules in doubles.items() if name not in MIRRORED} == {}
    assert MIRRORED.keys() <= doubles.keys(), "they have one now"
