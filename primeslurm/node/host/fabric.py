"""The node's fast network according to /sys: its interface, its HCAs, and the HCAs near each GPU.

Device names differ between clusters (mlx5_0, rocep1s0f0), so nothing here depends on them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SYS = Path("/sys")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # PCI classes VGA controller and 3D controller


@dataclass(frozen=True)
class Hca:
    """A host channel adapter with at least one active port."""

    name: str
    ports: tuple[int, ...]  # numbers of the active ports
    infiniband: bool  # otherwise Ethernet (RoCE)
    path: tuple[str, ...]  # place in the PCI tree, root first
    numa: int

    @property
    def devices(self) -> list[str]:
        """The active ports as NCCL and UCX name them, for example mlx5_0:1."""
        return [f"{self.name}:{port}" for port in self.ports]


def placeholders(hcas: Sequence[Hca], interface: str) -> dict[str, str]:
    """Return the values of the Plan's network placeholders, empty for what the node does not have."""
    devices = ",".join(device for hca in hcas for device in hca.devices)
    return {
        "interface": interface,
        # Without "=" NCCL takes names as prefixes: ib0 would include ib0.8001, and mlx5_1 would include mlx5_10.
        "nccl_interface": f"={interface}" if interface else "",
        "hcas": ",".join(hca.name for hca in hcas),
        "hca_ports": devices,
        "nccl_hcas": f"={devices}" if devices else "",
        # Without a device UCX would listen on all interfaces, and it does not authenticate its peers.
        "ucx_devices": devices or interface,
    }


def find_hcas(named: Sequence[str] = (), sys: Path = SYS) -> list[Hca]:
    """Return the HCAs with an active port, InfiniBand if there is any, else RoCE. `named` restricts the search."""
    root = sys / "class/infiniband"
    names = sorted((path.name for path in root.iterdir()), key=_natural) if root.is_dir() else []
    hcas = [hca for name in names if (not named or name in named) and (hca := _hca(root / name))]
    return [hca for hca in hcas if hca.infiniband] or hcas


def find_gpus(sys: Path = SYS) -> list[Path]:
    """Return the node's GPUs in the order of PCI addresses, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    root = sys / "bus/pci/devices"
    devices = sorted(root.iterdir()) if root.is_dir() else []
    return [
        device.resolve()
        for device in devices
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_GPU_CLASSES)
    ]


def nearest(hcas: Sequence[Hca], gpus: Sequence[Path]) -> list[Hca]:
    """Return the HCAs nearest to any of the GPUs: on the same PCI switch, else the same NUMA node. All without GPUs."""
    near: set[Hca] = set()
    for gpu in gpus:
        numa = _numa(gpu)
        closeness = {hca: (_shared_bridges(hca.path, gpu.parts), hca.numa == numa) for hca in hcas}
        near |= {hca for hca in hcas if closeness[hca] == max(closeness.values())}
    return [hca for hca in hcas if hca in near or not gpus]


def interface_of(address: str, interfaces: Mapping[str, str]) -> str:
    """Return the interface (name to IPv4 address) with an address; empty if there is none or only the loopback."""
    return next((name for name, other in interfaces.items() if other == address and name != "lo"), "")


def own_interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    return {
        name: each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in reversed(addresses)
        if each.family == socket.AF_INET
    }


def _hca(directory: Path) -> Hca | None:
    active = [port for port in (directory / "ports").iterdir() if _read(port / "state").endswith("ACTIVE")]
    infiniband = [port for port in active if _read(port / "link_layer") == "InfiniBand"]
    ports = infiniband or active
    if not ports:
        return None
    device = (directory / "device").resolve()
    return Hca(
        name=directory.name,
        ports=tuple(sorted(int(port.name) for port in ports)),
        infiniband=bool(infiniband),
        path=device.parts,
        numa=_numa(device),
    )


def _numa(device: Path) -> int:
    return int(_read(device / "numa_node") or -1)


def _shared_bridges(one: Sequence[str], other: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _natural(name: str) -> list[tuple[int, str]]:
    # Sorts mlx5_2 before mlx5_10.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
