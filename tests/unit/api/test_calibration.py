"""`calibrate`: its change of a site file, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from primeslurm.api.calibration import site_change
from primeslurm.base.errors import UsageError
from primeslurm.recipe.reading.recipe_files import load_site
from primeslurm.records.measured_rates import CalibrationRecord, MeasuredRate
from tests.support.cli import primeslurm

SITE = """# Our cluster
schema: 1
name: ours   # in the basement
runs: /shared/runs
nodes:
  default: {partition: gpu, gpus: 8, cpus: 96}
  control: {partition: cpu, cpus: 8}

# the network of both
network: {interface: ib0}
"""
FIELDS = ("products_tflops", "memory_gbytes_per_s", "storage_write_gbytes_per_s", "storage_read_gbytes_per_s")


def record(products: float, partition: str = "gpu") -> CalibrationRecord:
    rates = {field: MeasuredRate(2.0, 1.5, 2.5) for field in FIELDS}
    rates["products_tflops"] = MeasuredRate(products, products, products * 1.1)
    return CalibrationRecord("2026-11-30T13:05Z", partition, "cuda", 2, 8, rates, {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    return path


def test_rates_are_added_and_all_other_text_stays(file: Path) -> None:
    change = site_change(file, record(700.123))
    assert change.after.startswith(SITE) and file.read_text() == SITE
    change.write()
    rates = load_site(file).measured["gpu"]
    assert (rates.products_tflops, rates.nodes, rates.at) == (700, 2, "2026-11-30T13:05Z")
    assert rates.spread["memory_gbytes_per_s"] == 0.5
    changed = [line for line in change.diff.splitlines()[2:] if line[0] != " "]
    assert changed[1] == "+measured:  # written by `primeslurm calibrate`"
    assert all(line[0] == "+" for line in changed[1:])


def test_a_second_calibration_replaces_the_section_of_its_partition(file: Path) -> None:
    head, tail = SITE.split("\n# the network")
    site_change(file, record(1.0)).write()
    section = file.read_text().removeprefix(SITE)
    file.write_text(f"{head}\n{section}\n# the network{tail}")
    site_change(file, record(3.0, "cpu")).write()
    site_change(file, record(2.0)).write()
    rates = load_site(file).measured
    assert (rates["gpu"].products_tflops, rates["cpu"].products_tflops) == (2, 3)
    text = file.read_text()
    assert text.count("measured:") == 1 and text.startswith(head) and text.endswith(f"\n\n# the network{tail}")


@pytest.mark.parametrize("text", [yaml.safe_dump(yaml.safe_load(SITE), default_flow_style=True), f"{SITE}...\n"])
def test_a_text_that_cannot_be_extended_is_refused_with_the_section(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=r"(?s)add it yourself:\nmeasured:.*products_tflops: 700"):
        site_change(file, record(700.0))
    assert file.read_text() == text


def test_implausible_rates_are_refused(file: Path) -> None:
    with pytest.raises(UsageError, match=r"measured\.gpu\.products_tflops"):
        site_change(file, record(1e9))
    file.write_text(SITE.replace("cpus: 96", "cpus: 96, gpu: h200"))
    with pytest.raises(UsageError, match=r"measured\.gpu\.products_tflops = 2000: H200s have at most 989"):
        site_change(file, record(2000.0))


def test_every_mistake_is_reported_at_once(file: Path) -> None:
    rates = {"at": "yesterday", "device": "tpu", "nodes": 0, "ranks_per_node": 8, **dict.fromkeys(FIELDS, -1.0)}
    file.write_text(SITE + yaml.safe_dump({"measured": {"gpu": rates}}))
    result = primeslurm("calibrate", "--site", "site.yaml", cwd=file.parent)
    assert result.code == 2
    for field in ("at", "device", "nodes", *FIELDS):
        assert result.err.count(f"measured.gpu.{field} ") == 1, result.err
    file.write_text(SITE)
    unknown = primeslurm("calibrate", "--partition", "gpus", cwd=file.parent)
    expected = "error: --partition = gpus: is not in the site file, which has cpu, gpu (did you mean gpu?)\n"
    assert (unknown.code, unknown.err) == (2, expected)
    without = primeslurm("calibrate", "--partition", "cpu", cwd=file.parent)
    assert without.code == 2 and "--partition = cpu: has no GPUs" in without.err
    example = primeslurm("calibrate", "--site", "h200", cwd=file.parent)
    assert example.code == 2 and "--site" in example.err
