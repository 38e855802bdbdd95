"""Rates of the hardware that estimates use: measured ones of the site file, and assumptions for the others. Pure.

The constants of `plan.estimates.step_time` are shares of data sheet values, fitted together on H100s and H200s.
A measured rate is therefore converted to the data sheet value of a device that reaches the same share as an H200. An
H200 that measures what the recorded ones did keeps its estimates.
"""

from __future__ import annotations

from dataclasses import replace

from primeslurm.base import units
from primeslurm.base.errors import Violation
from primeslurm.plan.estimates.step_time import NETWORK_SHARE
from primeslurm.plan.forecast import Quantity
from primeslurm.plan.gpus import Gpu, gpu_of
from primeslurm.recipe.site import NodeKind, Site

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
    fp8, host = rates.fp8_tflops, rates.host_gbytes_per_s
    return replace(
        gpu,
        bf16_tflops=rates.products_tflops / PRODUCT_SHARE,
        memory_tb_s=rates.memory_gbytes_per_s / 1e3 / MEMORY_SHARE,
        update_bytes_s=1e9 * rates.memory_gbytes_per_s,
        nic_gbps=network / NETWORK_SHARE if network else gpu.nic_gbps,
        link_bytes_s=1e9 * link if link else gpu.link_bytes_s,
        host_bytes_s=1e9 * host if host else gpu.host_bytes_s,
        fp8_speedup=fp8 / rates.products_tflops if fp8 else gpu.fp8_speedup,
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
    kinds = {kind.partition: kind for kind in site.nodes.values()}
    for partition, rates in site.measured.items():
        field, redo = f"site {site.name}: measured.{partition}", "measure again: primeslurm calibrate"
        if partition not in kinds:
            problems.append(Violation(field, "", "no nodes of the site have this partition", "remove it"))
        elif rates.device != site.device:
            why = f"was measured on another device than the site's, which is {site.device}"
            problems.append(Violation(f"{field}.device", rates.device, why, redo))
        elif site.device == "cuda" and (gpu := gpu_of(kinds[partition])):
            peaks = {"products_tflops": gpu.bf16_tflops, "memory_gbytes_per_s": 1e3 * gpu.memory_tb_s}
            for name, peak in peaks.items():
                if (value := getattr(rates, name)) > peak:
                    why, fix = f"{gpu.name.upper()}s have at most {peak:g}", f"correct `gpu` of the nodes, or {redo}"
                    problems.append(Violation(f"{field}.{name}", f"{value:g}", why, fix))
    return problems


def rate_sources(site: Site, kind: NodeKind) -> list[Quantity]:
    """Return the rates that estimates of a kind of node use, and where each comes from."""
    gpu, network, rates = gpu_of(kind), site.network, site.measured.get(kind.partition)
    line = network.gbps_per_gpu or (gpu.nic_gbps if gpu else 0.0)
    files, from_site = "GB/s per node", "assumed: network.storage_gbytes_per_s of the site file"
    sheet, of_line = "assumed: {:.0%} of the data sheet", f"assumed: {NETWORK_SHARE:.0%} of the line rate"
    # Field, name, unit, assumption in place of a measurement, and its source
    table: list[tuple[str, str, str, float, str]] = [
        ("products_tflops", "matrix products", "TFLOPS", gpu.bf16_tflops if gpu else 0.0, sheet.format(PRODUCT_SHARE)),
        (
            "memory_gbytes_per_s",
            "device memory",
            "GB/s",
            1e3 * gpu.memory_tb_s if gpu else 0.0,
            sheet.format(MEMORY_SHARE),
        ),
        ("fp8_tflops", "matrix products in FP8", "TFLOPS", 0.0, ""),
        ("host_gbytes_per_s", "links to host memory", "GB/s each way", 0.0, ""),
        ("node_gbytes_per_s", "links of a node", "GB/s", 0.0, ""),
        ("network_gbps_per_gpu", "links between nodes", "Gbit/s per GPU", line, of_line),
        ("storage_write_gbytes_per_s", "written files", files, network.storage_gbytes_per_s, from_site),
        ("storage_read_gbytes_per_s", "read files", files, network.storage_gbytes_per_s, from_site),
    ]
    sources = []
    for field, name, unit, assumed, source in table:
        if rates and (value := getattr(rates, field)):
            spread = f", spread {rates.spread[field]:.0%}" if field in rates.spread else ""
            how = f"measured on {units.count(rates.nodes, 'node')} on {rates.at[:10]}{spread}"
            sources.append(Quantity(name=name, value=value, unit=unit, how=how))
        elif assumed:
            sources.append(Quantity(name=name, value=assumed, unit=unit, how=source))
    return sources
