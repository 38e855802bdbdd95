"""Figures of the explanation pages are accessible: to a screen reader, and in dark mode."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

PAGES = Path(__file__).resolve().parents[3] / "docs" / "explanation"
SVG = "{http://www.w3.org/2000/svg}"
FIGURES = sorted(
    (page.parent / target).resolve()
    for page in PAGES.glob("*.md")
    for target in re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", page.read_text())
)


def test_there_are_figures() -> None:
    assert {figure.name for figure in FIGURES} >= {"architecture.svg", "async_step.svg"}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_a_figure_describes_itself_and_loads_nothing(figure: Path) -> None:
    text = figure.read_text()
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    labels = [root.find(f"{SVG}{name}") for name in ("title", "desc")]
    assert all(label is not None and label.text for label in labels)
    assert root.get("aria-labelledby") == " ".join(label.get("id", "") for label in labels if label is not None)
    assert not re.search(r'(href|src)="(?!#)|@import|url\((?!#)', text)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_a_figure_defines_every_colour_for_light_and_dark_mode(figure: Path) -> None:
    text = figure.read_text()
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    defined = set(re.findall(r"(--[\w-]+):", light))
    assert defined and defined == set(re.findall(r"(--[\w-]+):", dark.partition("}")[0]))
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) == defined
