"""The node's fast network, as Linux describes it under /sys: interface, HCAs, and which HCA is near to which GPU.

Nothing is assumed of names: the same recipe runs where HCAs are called mlx5_0 and where they are called rocep1s0f0.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from primeslurm.node.host.network import NetworkError, interface_address

SYS = Path("/sys")
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
"""PCI classes of GPUs: VGA controller and 3D controller."""


@dataclass(frozen=True)
class Hca:
    """A host channel adapter with at least one active port."""

    name: str
    ports: tuple[int, ...]
    """Numbers of its active ports."""
    infiniband: bool
    """Whether those ports are InfiniBand; otherwise Ethernet (RoCE)."""
    path: tuple[str, ...]
    """Its place in the PCI tree, root first."""
    numa: int

    @property
    def devices(self) -> list[str]:
        """Its active ports as NCCL and UCX write them, for example mlx5_0:1."""
        return [f"{self.name}:{port}" for port in self.ports]


def placeholders(hcas: Sequence[Hca], interface: str) -> dict[str, str]:
    """Tell what a Plan may ask for of a node's network. Empty: this node has none of it."""
    devices = ",".join(device for hca in hcas for device in hca.devices)
    return {
        "interface": interface,
        "nccl_interface": f"={interface}" if interface else "",  # as below: ib0 means ib0.8001 as well
        "hcas": ",".join(hca.name for hca in hcas),
        "hca_ports": devices,
        "nccl_hcas": f"={devices}" if devices else "",  # exactly these: without the sign mlx5_1 means mlx5_10 as well
        "ucx_devices": devices or interface,  # or it would listen on all interfaces, and asks nobody who he is
    }


def find_hcas(named: Sequence[str] = (), sys: Path = SYS) -> list[Hca]:
    """Find HCAs with an active port, InfiniBand if there is any and else RoCE; `named` limits them to these."""
    root = sys / "class/infiniband"
    names = sorted((path.name for path in root.iterdir()), key=_natural) if root.is_dir() else []
    found = [hca for name in names if (not named or name in named) and (hca := _hca(root / name))]
    return [hca for hca in found if hca.infiniband] or found


def find_gpus(sys: Path = SYS) -> list[Path]:
    """Find the node's GPUs in the order of their PCI addresses, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    root = sys / "bus/pci/devices"
    devices = sorted(root.iterdir()) if root.is_dir() else []
    return [
        device.resolve()
        for device in devices
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY_CLASSES)
    ]


def nearest(hcas: Sequence[Hca], gpus: Sequence[Path]) -> list[Hca]:
    """Find the HCAs nearest to any GPU: same PCI switch before same NUMA node before the rest. All without GPUs."""
    near: set[Hca] = set()
    for gpu in gpus:
        numa = _numa(gpu)
        closeness = {hca: (_shared(hca.path, gpu.parts), hca.numa == numa) for hca in hcas}
        near |= {hca for hca in hcas if closeness[hca] == max(closeness.values())}
    return [hca for hca in hcas if hca in near or not gpus]


def interface_of(address: str, interfaces: Mapping[str, str]) -> str:
    """Find the interface (name to IPv4 address) that owns an address; empty if none does, or only the loopback."""
    return next((name for name, own in interfaces.items() if own == address and name != "lo"), "")


def own_interfaces() -> dict[str, str]:
    """Find every interface with an IPv4 address, and that address."""
    found: dict[str, str] = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(NetworkError):  # it has none
            found[name] = interface_address(name)
    return found


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


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many bridges two places of the PCI tree have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _natural(name: str) -> list[tuple[int, str]]:
    """mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
