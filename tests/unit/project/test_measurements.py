"""The measurement pages show all of benchmarks/results."""

from __future__ import annotations

import re
import string

import pytest

from scripts import measurements
from scripts.measurements import RESULTS, Row

TABLES = [table for page in measurements.PAGES for table in measurements.specification()[page]]


def test_every_results_file_is_shown() -> None:
    shown = {name for table in TABLES for name in table["files"]}
    assert shown == {path.stem for path in RESULTS.glob("*.json")}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["title"])
def test_a_table_has_rows_and_names_its_origin(table: Row) -> None:
    rows = list(measurements.rows_of(table))
    assert rows
    labels = [path for _, path, _, _ in string.Formatter().parse(next(iter(table["columns"].values()))) if path]
    assert all(measurements.value_at(row, labels[0]) is not None for row in rows)
    text = measurements.section(table)
    assert "- Command: ``" not in text and "- Hardware: not recorded" not in text


def test_every_path_of_the_tables_leads_to_a_value() -> None:
    """Tables share column sets, so a path may be missing from one table but not from all."""
    filled, named = set(), set()
    for table in TABLES:
        paths = {path for text in table["columns"].values() for _, path, _, _ in string.Formatter().parse(text) if path}
        named |= paths
        rows = list(measurements.rows_of(table))
        filled |= {path for path in paths if any(measurements.value_at(row, path) is not None for row in rows)}
    assert named == filled


def test_pages_say_where_recorded_numbers_are_from() -> None:
    for entry in measurements.recorded():
        assert entry["page"] in measurements.PAGES
        assert all(len(row) == len(entry["columns"]) for row in entry["rows"]), entry["title"]
        assert re.search(r"\n- Source: \S", measurements.recorded_section(entry))


def test_headlines_have_all_their_numbers() -> None:
    for headline in measurements.specification()["headlines"]:
        assert headline["page"] in measurements.PAGES
        paths = [path for _, path, _, _ in string.Formatter().parse(headline["text"]) if path]
        data = measurements.load(headline["file"])
        assert paths and all(measurements.value_at(data, path) is not None for path in paths), headline["text"]
