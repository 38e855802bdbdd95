"""Rates of the hardware that estimates use: measured ones of the site file, and assumptions for the others. Pure.

The constants of `plan.memory.step_time` are shares of data sheet values, and were fitted together on H100s and H200s.
A measured rate is therefore converted to the data sheet value of a device that reaches the same share as an H200. An
H200 that measures what the recorded ones did keeps its estimates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from primeslurm.base.errors import Violation
from primeslurm.plan.forecast import Quantity
from primeslurm.plan.gpus import Gpu, gpu_of
from primeslurm.plan.memory.step_time import NETWORK_SHARE
from primeslurm.recipe.site import MeasuredRates, NodeKind, Site

# Share of the peak that one large product reaches on an H200 (783 of 989 TFLOPS, `fp8_products_h200.json`)
PRODUCT_SHARE = 0.79
# The same of AdamW and the memory's bandwidth (4 of 4.8 TB/s)
MEMORY_SHARE = 4 / 4.8


def rated_gpu(site: Site, kind: NodeKind) -> Gpu | None:
    """Return the GPU of a kind of node with its measured rates; None if it is unknown and was not measured."""
    gpu, rates = gpu_of(kind), site.measured.get(kind.partition)
    if rates is None:
        return gpu
    gpu = gpu or Gpu("CPU" if site.device == "cpu" else "GPU", 0.0, 0, 0.0, 0.0, 0.0)
    network, link = rates.network_gbps_per_gpu, rates.node_gbytes_per_s
    return replace(
        gpu,
        bf16_tflops=rates.products_tflops / PRODUCT_SHARE,
        memory_tb_s=rates.memory_gbytes_per_s / 1e3 / MEMORY_SHARE,
        update_bytes_s=1e9 * rates.memory_gbytes_per_s,
        nic_gbps=network / NETWORK_SHARE if network else gpu.nic_gbps,
        link_bytes_s=1e9 * link if link else gpu.link_bytes_s,
    )


def line_rate(site: Site, kind: NodeKind) -> float | None:
    """Return the line rate between nodes per GPU [Gbit/s]: measured, of the site, or of a typical node; else None."""
    rates, gpu = site.measured.get(kind.partition), rated_gpu(site, kind)
    if gpu and rates and rates.network_gbps_per_gpu:
        return gpu.nic_gbps
    return site.network.gbps_per_gpu or (gpu and gpu.nic_gbps) or None


def measured_problems(site: Site) -> list[Violation]:
    """Return a violation for each measured rate that these nodes cannot have."""
    problems = []
    for partition, rates in site.measured.items():
        field, redo = f"site {site.name}: measured.{partition}", "measure again: primeslurm calibrate"
        kind = next((kind for kind in site.nodes.values() if kind.partition == partition), None)
        if kind is None:
            problems.append(Violation(field, "", "no nodes of the site have this partition", "remove it"))
            continue
        if rates.device != site.device:
            why = f"was measured on another device than the site's, which is {site.device}"
            problems.append(Violation(f"{field}.device", rates.device, why, redo))
        elif site.device == "cuda" and (gpu := gpu_of(kind)):
            problems += _above_peak(f"{field}.products_tflops", rates.products_tflops, gpu.bf16_tflops, "TFLOPS", gpu)
            limit = 1e3 * gpu.memory_tb_s
            problems += _above_peak(f"{field}.memory_gbytes_per_s", rates.memory_gbytes_per_s, limit, "GB/s", gpu)
    return problems


def _above_peak(field: str, value: float, peak: float, unit: str, gpu: Gpu) -> Iterator[Violation]:
    if value > peak:
        why = f"an {gpu.name.upper()} has at most {peak:g} {unit}"
        yield Violation(field, f"{value:g}", why, "correct `gpu` of the nodes, or measure again: primeslurm calibrate")


def rate_sources(site: Site, kind: NodeKind) -> list[Quantity]:
    """Return the rates that estimates of a kind of node use, and where each comes from."""
    rates, gpu = site.measured.get(kind.partition), gpu_of(kind)
    sheet = f"assumed: {PRODUCT_SHARE:.0%} of the data sheet" if gpu else ""
    memory = f"assumed: {MEMORY_SHARE:.0%} of the data sheet" if gpu else ""
    line = site.network.gbps_per_gpu or (gpu.nic_gbps if gpu else 0.0)
    source = "network.gbps_per_gpu of the site file" if site.network.gbps_per_gpu else "the usual line rate"
    defaults = {
        "products_tflops": ("matrix products", "TFLOPS", PRODUCT_SHARE * gpu.bf16_tflops if gpu else 0.0, sheet),
        "memory_gbytes_per_s": ("device memory", "GB/s", 1e3 * MEMORY_SHARE * gpu.memory_tb_s if gpu else 0.0, memory),
        "node_gbytes_per_s": ("between GPUs of a node", "GB/s", 0.0, ""),
        "network_gbps_per_gpu": (
            "between nodes",
            "Gbit/s per GPU",
            NETWORK_SHARE * line,
            f"assumed: {NETWORK_SHARE:.0%} of {source}",
        ),
        "storage_write_gbytes_per_s": (
            "files, written",
            "GB/s per node",
            site.network.storage_gbytes_per_s,
            "network.storage_gbytes_per_s of the site file",
        ),
        "storage_read_gbytes_per_s": (
            "files, read",
            "GB/s per node",
            site.network.storage_gbytes_per_s,
            "network.storage_gbytes_per_s of the site file",
        ),
    }
    sources = []
    for field, (name, unit, value, assumed) in defaults.items():
        if rates and (measured := getattr(rates, field)):
            sources.append(Quantity(name=name, value=measured, unit=unit, how=_when(rates, field)))
        elif value:
            sources.append(Quantity(name=name, value=round(value, 1), unit=unit, how=assumed))
    return sources


def _when(rates: MeasuredRates, field: str) -> str:
    nodes = f"{rates.nodes} node{'s' * (rates.nodes > 1)}"
    spread = f", spread {rates.spread[field]:.0%}" if field in rates.spread else ""
    return f"measured on {nodes} on {rates.at[:10]}{spread}"
