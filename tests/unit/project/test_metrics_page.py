"""The metrics page explains every metric of a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from primeslurm.orchestrator.telemetry import progress_monitor
from primeslurm.records.attempt import FIRST_STEP
from primeslurm.records.evaluation import Estimated, LabelResult

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "primeslurm"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
WRITERS = (
    ("orchestrator/telemetry/batch_metrics.py", "", None),
    ("orchestrator/telemetry/progress_monitor.py", "", {"step_metrics"}),
    ("orchestrator/teacher.py", "", {"take_metrics"}),
    ("orchestrator/dispatch/dispatcher.py", "queue/", {"queue_lengths"}),
    ("orchestrator/dispatch/curricula.py", "", {"take_metrics"}),
    ("orchestrator/telemetry/rollout_recorder.py", "", {"take_metrics"}),
    ("orchestrator/batching/group_filter.py", "env/*/", {"take_metrics"}),
    ("trainer/components/loss.py", "trainer/", {"from_recipe", "cross_entropy", "_mismatch", "_policy_gradient"}),
    ("trainer/components/loss.py", "trainer/", {"_reference_kl"}),
    ("trainer/policy/train_step.py", "trainer/", {"train"}),
    ("trainer/policy/train_step.py", "trainer/", {"take"}),
    ("trainer/policy/draft_training.py", "trainer/", {"update"}),
    ("trainer/policy/flops_meter.py", "trainer/", {"take"}),
    ("trainer/base/phase_timer.py", "trainer/", {"take"}),
    ("orchestrator/weight_updates/weight_update_loop.py", "", {"update_metrics"}),
)
"""Module, prefix of its metric names, and the functions that write them; None for all."""
PLACEHOLDERS = {"E", "A", "R", "*"}


def pattern(node: ast.AST) -> str | None:
    """Return a literal or f-string with * for its variable parts; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern(part) or "*" for part in node.values)
    return None


def keys(function: ast.AST) -> Iterator[str]:
    """Yield the keys of dictionaries that a function makes, and names that it zips with values."""
    for node in ast.walk(function):
        match node:
            case ast.Dict(keys=found):
                yield from filter(None, (pattern(key) for key in found if key is not None))
            case ast.DictComp(key=key) if name := pattern(key):
                yield name
            case ast.Subscript(slice=key, ctx=ast.Store()) if name := pattern(key):
                yield name
            case ast.Call(func=ast.Name(id="zip"), args=[ast.Tuple(elts=names), *_]):
                yield from filter(None, map(pattern, names))


def emitted() -> set[str]:
    """Return the names of all metrics, with * for parts that differ between runs."""
    metrics = {f"engines/*/{name}" for name in progress_monitor._ROW_LOADS} | {FIRST_STEP}
    for module, prefix, functions in WRITERS:
        for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
            if isinstance(node, ast.FunctionDef) and (functions is None or node.name in functions):
                metrics |= {name if name.startswith(prefix) else prefix + name for name in keys(node)}
    for module in (PACKAGE / "trainer").rglob("*.py"):
        metrics |= {f"trainer/seconds/{name}" for name in re.findall(r'\.phase\("(\w+)"\)', module.read_text())}
    estimate = Estimated(0.5, 0.1)
    result = LabelResult(
        label="x",
        examples=2,
        samples=4,
        reward=estimate,
        pass_at={1: estimate},
        failed=0.0,
        truncated=0.0,
        length=1.0,
        turns=1.0,
        metrics={"x": 1.0},
    )
    # Loops over the names that are collected above.
    metrics -= {"engines/*/*", "env/*/*", "queue/*", "trainer/seconds/*"}
    return metrics | {f"eval/*/{name.replace('@1', '@k').replace('/x', '/*')}" for name in result.row()}


def documented() -> list[list[str]]:
    rows = re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.MULTILINE)
    return [name.split("/") for row in rows for name in re.findall(r"`(.+?)`", row)]


def is_documented(name: str) -> bool:
    """Compare part by part. Only a placeholder matches a variable part."""
    parts = name.split("/")
    return any(
        len(parts) == len(shown)
        and all(
            part == documented_part
            or (documented_part in PLACEHOLDERS and (part == "*" or (documented_part == "*" and i > 0)))
            for i, (part, documented_part) in enumerate(zip(parts, shown, strict=True))
        )
        for shown in documented()
    )


def test_every_metric_is_on_the_page() -> None:
    names = emitted()
    assert {"reward/mean", "trainer/mismatch_kl", "trainer/seconds/wait", "engines/*/busy_mean"} <= names
    assert sorted(name for name in names if not is_documented(name)) == []


def test_a_new_metric_is_missed() -> None:
    assert not is_documented("rollouts/of_a_new_kind")
    assert not is_documented("engines/*/of_a_new_kind")
