"""The rates that the ranks of a calibration job measured."""

from __future__ import annotations

import msgspec

FILE = "rates.json"


class MeasuredRate(msgspec.Struct, frozen=True):
    """Median, smallest and largest value of a rate, over all repeats on all ranks."""

    median: float
    low: float
    high: float


class CalibrationRecord(msgspec.Struct, frozen=True):
    """`rates.json` of a calibration run."""

    at: str  # date and time in UTC, as 2026-11-30T13:05Z
    partition: str
    device: str  # cuda or cpu
    nodes: int
    ranks_per_node: int
    rates: dict[str, MeasuredRate]  # by field of `MeasuredRates` in the site file
    products: dict[str, MeasuredRate]  # of matrix products by rows x inputs x outputs [TFLOPS], the largest last
