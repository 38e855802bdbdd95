"""What is decided once is written once: no two modules define a constant of the same name and value."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "primeslurm"
TWICE = {
    "GB": "a unit",
    "LOOK_S": "looks at different things: another agent's directory, a thread",
    "PERIOD_S": "the period of a module's own loop",
    "PROMPT": "of the bundled environment, whose words a tiny model of the trainer learns; no room imports the other",
    "SYS": "a path of Linux's",
    "TYPE_CHECKING": "as in typing, where importing that takes too long",
    "_POLL_S": "the pause of a module's own loop",
}
"""Constants that several modules define alike, and why."""
BY_MODULE = ("TypeVar(", "logging.getLogger(")
"""What every module has of its own."""


def constants(path: Path) -> Iterator[tuple[str, str]]:
    """Names and values of the constants that a module defines at its top."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, ast.unparse(node.value)
            if isinstance(target, ast.Name) and not value.startswith(BY_MODULE):
                yield target.id, value


def test_a_constant_is_defined_once() -> None:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, value in constants(path):
            found[name, value].append(str(path.relative_to(PACKAGE)))
    doubles = {definition: modules for definition, modules in found.items() if len(modules) > 1}
    assert {key: modules for key, modules in doubles.items() if key[0] not in TWICE} == {}
    assert TWICE.keys() == {name for name, _ in doubles}, "they are defined once now"
