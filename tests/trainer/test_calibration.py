"""Rates that ranks of a calibration measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from primeslurm.trainer.calibration import (
    REPEATS,
    Sizes,
    _fp8_product,
    _seconds_if_possible,
    measure,
    summarize,
)
from primeslurm.trainer.distributed.world import World


def test_rates_are_medians_over_all_ranks() -> None:
    (rate,) = summarize([{"a": [1.0, 9.0]}, {"a": [2.0], "b": []}, {}]).values()
    assert (rate.median, rate.low, rate.high) == (2.0, 1.0, 9.0)


def test_fp8_products_and_rates_that_fail(world: World) -> None:
    times = _seconds_if_possible(world, "FP8 products", lambda: _fp8_product(world.device, 16, 32, 48))
    assert len(times) == REPEATS and min(times) > 0
    assert _fp8_product(world.device, 16, 32, 48)().shape == (16, 48)

    def fail() -> Callable[[], object]:
        raise RuntimeError("no kernel image is available")

    assert _seconds_if_possible(world, "FP8 products", fail) == []


def test_one_rank_measures_everything_but_links(world: World, tmp_path: Path) -> None:
    sizes = Sizes(((8, 8, 8), (16, 16, 16)), 2**12, 2**10, 2**12)
    samples, products = measure(world, tmp_path, 1, sizes)
    rates = summarize([samples])
    assert set(rates) == {
        *("products_tflops", "memory_gbytes_per_s"),
        *("storage_write_gbytes_per_s", "storage_read_gbytes_per_s"),
    }
    assert samples["products_tflops"] == products["16x16x16"] != products["8x8x8"]
    assert all(0 < rate.low <= rate.median <= rate.high for rate in rates.values())
    assert not list(tmp_path.iterdir()), "files of the measurement are removed"
