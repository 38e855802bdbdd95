"""The Grafana dashboard that is shipped shows metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base.paths import shipped
from primeslurm.node.head import exporter
from primeslurm.node.head.exporter import labelled
from tests.unit.project.test_metrics_page import emitted

DASHBOARD: dict[str, Any] = json.loads(shipped("templates/grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
OWN = re.compile(r"\bprimeslurm_\w+")
OF_VLLM = re.compile(r"\bvllm:\w+")


def exposed() -> set[str]:
    """Return the names that the head exposes, besides those of metrics that only some runs have."""
    added = {value for value in vars(exporter).values() if isinstance(value, str) and value.startswith("primeslurm_")}
    return added | {labelled(name.replace("*", "x"))[0] for name in emitted()} | {labelled("words/reward")[0]}


def missing(expression: str) -> list[str]:
    return sorted(set(OWN.findall(expression)) - exposed())


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_panel_shows_metrics_of_the_head(title: str, expression: str) -> None:
    assert OWN.search(expression) or OF_VLLM.search(expression), title
    assert missing(expression) == []
    assert 'run=~"$run"' in expression, "it would mix runs"


def test_unknown_metric_is_noticed() -> None:
    assert missing('primeslurm_step{run="x"} + primeslurm_of_a_new_kind') == ["primeslurm_of_a_new_kind"]


def test_vllm_has_the_metrics_of_engines() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "v1/metrics/loggers.py").read_text()
    names = {name for _, expression in EXPRESSIONS for name in OF_VLLM.findall(expression)}
    assert len(names) >= 3
    # prometheus_client adds these endings to counters and histograms.
    assert [name for name in names if f'"{re.sub("_(total|bucket)$", "", name)}"' not in source] == []


def test_panels_have_room_and_one_data_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) == 23
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
