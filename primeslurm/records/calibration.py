"""The rates that the ranks of a calibration job measured."""

from __future__ import annotations

import msgspec

FILE = "rates.json"


class MeasuredRate(msgspec.Struct, frozen=True):
    """One rate: the median, smallest and largest of all repeats on all ranks."""

    median: float
    low: float
    high: float
    samples: int

    @property
    def spread(self) -> float:
        """Difference of the largest and the smallest value, as a share of the median."""
        return (self.high - self.low) / self.median


class CalibrationRecord(msgspec.Struct, frozen=True):
    """`rates.json` of a calibration run."""

    at: str  # date and time in UTC, as 2026-11-30T13:05Z
    partition: str
    device: str  # cuda or cpu
    device_name: str
    nodes: int
    ranks_per_node: int
    rates: dict[str, MeasuredRate]
    """Rates by field of `MeasuredRates` in the site file."""
    products: dict[str, MeasuredRate]
    """Matrix products by rows x inputs x outputs [TFLOPS]. The largest one, the last, is the rate."""
