"""Measured rates of a site: what estimates do with them, what plans say, and which rates are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from primeslurm.models.catalog import catalog
from primeslurm.plan.checks.files import model_files
from primeslurm.plan.estimates.rates import MEMORY_SHARE, PRODUCT_SHARE, line_rate, measured_problems, rated_gpu
from primeslurm.plan.estimates.step_time import DISPATCH, StepTime, step_time
from primeslurm.plan.gpus import GPUS
from primeslurm.plan.planner import RecipeFiles, make_plan
from primeslurm.recipe import Recipe, Site
from tests.support.recipes import recipe_data, site

QWEN3 = "Qwen/Qwen3-30B-A3B"
# An H200 as recorded, in a node without NVLink
RATES: dict[str, Any] = {
    "at": "2026-11-30T13:05Z",
    "device": "cuda",
    "nodes": 2,
    "ranks_per_node": 8,
    "products_tflops": PRODUCT_SHARE * 989,
    "memory_gbytes_per_s": MEMORY_SHARE * 4800,
    "storage_write_gbytes_per_s": 1.5,
    "storage_read_gbytes_per_s": 3.0,
    "spread": {"products_tflops": 0.03},
}


def measured(*, partition: str = "gpu", gres: str = "gpu:h200", **changes: Any) -> Site:
    return site(nodes={"default": {"gres": gres}}, measured={partition: RATES | changes})


def step(where: Site, trainer: Mapping[str, Any] = {}, **parallelism: int) -> StepTime:
    kind = where.kind("train")
    assert kind is not None
    gpu, line = rated_gpu(where, kind), line_rate(where, kind)
    assert gpu is not None and line is not None
    recipe = Recipe.model_validate(recipe_data(trainer={"parallelism": parallelism, **trainer}))
    shape = catalog()[QWEN3].shape
    return step_time(recipe, shape, gpu, nodes=2, gpus=8, gbps=line, tokens=65536, length=4096)


def test_an_h200_that_measures_what_was_recorded_keeps_its_estimates() -> None:
    unmeasured = site(nodes={"default": {"gres": "gpu:h200"}})
    kind = unmeasured.kind("train")
    assert kind is not None and rated_gpu(unmeasured, kind) == GPUS["h200"]
    assert step(measured(), ep=8).longest == pytest.approx(step(unmeasured, ep=8).longest)


def test_parts_of_a_step_follow_the_rate_that_they_use() -> None:
    usual = step(measured(), ep=8)
    slow_products = step(measured(products_tflops=RATES["products_tflops"] / 2), ep=8)
    assert slow_products.products == pytest.approx(2 * usual.products) and slow_products.weights == usual.weights
    slow_memory = step(measured(memory_gbytes_per_s=RATES["memory_gbytes_per_s"] / 2), ep=8)
    assert slow_memory.weights == pytest.approx(2 * usual.weights)
    assert slow_memory.optimizer == pytest.approx(2 * usual.optimizer)
    no_nvlink = step(measured(node_gbytes_per_s=23.0), ep=8)
    assert no_nvlink.dispatch == pytest.approx(usual.dispatch * DISPATCH["torch"] / 23e9)
    assert step(measured(node_gbytes_per_s=900.0), ep=8).dispatch == usual.dispatch, "fitted rates include copies"
    assert step(measured(network_gbps_per_gpu=160.0), ep=8).network == pytest.approx(2 * usual.network)
    offloads = {"memory": {"optimizer_state_offload": True}}
    slow_link = step(measured(host_gbytes_per_s=1.0), offloads, ep=8).optimizer
    assert step(measured(host_gbytes_per_s=2.0), offloads, ep=8).optimizer == pytest.approx(slow_link / 2)
    fp8 = step(measured(fp8_tflops=1.5 * RATES["products_tflops"]), {"fp8": True}, ep=8)
    assert fp8.products == pytest.approx(usual.products / 1.5)


def test_a_measured_device_of_unknown_type_has_step_times() -> None:
    unknown = measured(gres="gpu", network_gbps_per_gpu=320.0)
    assert step(unknown).longest == pytest.approx(step(measured(network_gbps_per_gpu=320.0)).longest)


def test_plan_tells_measured_rates_from_assumptions(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(recipe_data(model={"path": QWEN3, "dtype": "bfloat16"}))
    plan = make_plan(recipe, measured(), tmp_path, RecipeFiles(recipe, model_files(recipe), None)).plan
    assert plan.estimate is not None
    sources = {rate.name: rate.how for rate in plan.estimate.rates}
    assert sources["matrix products"] == "measured on 2 nodes on 2026-11-30, spread 3%"
    assert sources["written files"] == "measured on 2 nodes on 2026-11-30"
    assert sources["links between nodes"] == "assumed: 80% of the line rate"
    signal = next(amount for amount in plan.estimate.amounts if amount.name == "checkpoint signal")
    assert "4 min 4 s of writing a checkpoint" in signal.how, "366 GB at the measured 1.5 GB/s"


def test_each_implausible_rate_is_reported_once() -> None:
    found = measured(products_tflops=2000.0, memory_gbytes_per_s=9000.0)
    assert [violation.field.partition(": ")[2] for violation in measured_problems(found)] == [
        "measured.gpu.products_tflops",
        "measured.gpu.memory_gbytes_per_s",
    ]
    (device,) = measured_problems(measured(device="cpu", products_tflops=2000.0))
    assert device.field.endswith("measured.gpu.device") and "cuda" in device.why
    (partition,) = measured_problems(measured(partition="gone"))
    assert partition.field.endswith("measured.gone")
    assert not measured_problems(measured())
