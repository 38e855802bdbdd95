"""Numbers formatted for people."""

from __future__ import annotations

import pytest

from primeslurm.base import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.34, "2.3 s"),
        (9.96, "10 s"),
        (45.4, "45 s"),
        (59.7, "1 min"),
        (82, "1 min 22 s"),
        (3599.6, "1 h"),
        (6960, "1 h 56 min"),
        (7200, "2 h"),
        (86_399, "1 d"),
        (2 * 86_400 + 3 * 3600 + 59, "2 d 3 h"),
        (-90, "-1 min 30 s"),
    ],
)
def test_duration_uses_its_two_largest_units(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (1500, "1.5 kB"), (999_600, "1 MB"), (8_926_900_000_000, "8.9 TB"), (5e18, "5000 PB")],
)
def test_size_uses_decimal_units(size: float, text: str) -> None:
    assert units.size(size) == text


@pytest.mark.parametrize(("count", "text"), [(128, "128"), (8192, "8.2k"), (131_072, "131k"), (1_200_000, "1.2M")])
def test_tokens_are_counted_in_thousands(count: int, text: str) -> None:
    assert units.tokens(count) == text


def test_numbers_have_separators() -> None:
    assert (units.number(10_752.4), units.gib(113.9), units.gib(8.34)) == ("10,752", "114 GiB", "8.3 GiB")
