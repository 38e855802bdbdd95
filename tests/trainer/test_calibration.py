"""Rates that ranks of a calibration measure."""

from __future__ import annotations

from pathlib import Path

from primeslurm.trainer.calibration import Sizes, measure, record_of, summarize
from primeslurm.trainer.distributed.world import World


def test_rates_are_medians_over_all_ranks() -> None:
    (rate,) = summarize([{"a": [1.0, 9.0]}, {"a": [2.0]}, {}]).values()
    assert (rate.median, rate.low, rate.high, rate.samples, rate.spread) == (2.0, 1.0, 9.0, 3, 4.0)


def test_one_rank_measures_everything_but_links(world: World, tmp_path: Path) -> None:
    sizes = Sizes(((8, 8, 8), (16, 16, 16)), 2**12, 2**10, 2**12)
    record = record_of(world, "gpu", [measure(world, tmp_path, 1, sizes)], 1)
    assert set(record.rates) == {
        *("products_tflops", "memory_gbytes_per_s"),
        *("storage_write_gbytes_per_s", "storage_read_gbytes_per_s"),
    }
    assert record.rates["products_tflops"] == record.products["16x16x16"]
    assert all(0 < rate.low <= rate.median <= rate.high for rate in record.rates.values())
    assert (record.nodes, record.ranks_per_node, record.device) == (1, 1, world.device.type)
    assert not list(tmp_path.iterdir()), "files of the measurement are removed"
