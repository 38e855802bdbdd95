"""HCAs, GPUs and interfaces in fake /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.node.host import fabric


class Machine:
    """A /sys under construction."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def hca(
        self, name: str, place: str, numa: int = 0, link: str = "InfiniBand", states: tuple[str, ...] = ("4: ACTIVE",)
    ) -> None:
        device = self._device(place, numa)
        directory = self.root / "class/infiniband" / name
        for number, state in enumerate(states, 1):
            port = directory / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "link_layer").write_text(f"{link}\n")
        (directory / "device").symlink_to(device)

    def gpu(self, place: str, numa: int = 0, vendor: str = "0x10de", kind: str = "0x030200") -> None:
        device = self._device(place, numa)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        listed = self.root / "bus/pci/devices"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / device.name).symlink_to(device)

    def _device(self, place: str, numa: int) -> Path:
        device = self.root / "devices" / place
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        return device

    def names(self, named: tuple[str, ...] = ()) -> list[str]:
        return [hca.name for hca in fabric.find_hcas(named, self.root)]

    def near(self, *gpus: int) -> list[str]:
        paths = fabric.find_gpus(self.root)
        return [h.name for h in fabric.nearest(fabric.find_hcas((), self.root), [paths[i] for i in gpus])]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def hgx(machine: Machine) -> Machine:
    """Two sockets with two PCI switches each. Each switch has a GPU and an HCA. Socket 1 has another HCA."""
    for index, (root, switch) in enumerate([("pci0000:00", "00"), ("pci0000:00", "20"), ("pci0000:80", "80")]):
        numa = int(root == "pci0000:80")
        machine.gpu(f"{root}/{switch}:01.0/0000:{switch}:02.0/0000:{index}1:00.0", numa)
        machine.hca(f"mlx5_{index}", f"{root}/{switch}:01.0/0000:{switch}:02.0/0000:{index}2:00.0", numa)
    machine.hca("mlx5_10", "pci0000:c0/0000:c1:00.0", 1)
    machine.gpu("pci0000:c8/0000:c9:00.0", 1)
    return machine


def test_a_machine_without_devices_has_none(machine: Machine) -> None:
    assert machine.names() == [] and fabric.find_gpus(machine.root) == []
    assert set(fabric.placeholders([], "").values()) == {""}


def test_inactive_ports_do_not_count_and_infiniband_comes_before_ethernet(machine: Machine) -> None:
    machine.hca("mlx5_2", "a/1", states=("1: DOWN", "4: ACTIVE"))
    machine.hca("mlx5_1", "a/2", states=("1: DOWN",))
    machine.hca("rocep3", "a/3", link="Ethernet")
    assert [hca.devices for hca in fabric.find_hcas((), machine.root)] == [["mlx5_2:2"]]


def test_without_infiniband_roce_is_used(machine: Machine) -> None:
    machine.hca("rocep3", "a/3", link="Ethernet")
    assert machine.names() == ["rocep3"]


def test_the_site_restricts_the_hcas(hgx: Machine) -> None:
    assert hgx.names() == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    assert hgx.names(("mlx5_10", "mlx5_0", "mlx5_99")) == ["mlx5_0", "mlx5_10"]


def test_placeholders_name_exactly_the_active_devices(hgx: Machine) -> None:
    values = fabric.placeholders(fabric.find_hcas(("mlx5_0", "mlx5_10"), hgx.root), "ib0")
    assert values == {
        "interface": "ib0",
        "hcas": "mlx5_0,mlx5_10",
        "nccl_interface": "=ib0",
        "hca_ports": "mlx5_0:1,mlx5_10:1",
        "nccl_hcas": "=mlx5_0:1,mlx5_10:1",
        "ucx_devices": "mlx5_0:1,mlx5_10:1",
    }


def test_without_hcas_ucx_stays_on_the_interface_of_the_node_s_address() -> None:
    assert fabric.placeholders([], "eth1") == {
        "interface": "eth1",
        "nccl_interface": "=eth1",
        "hcas": "",
        "hca_ports": "",
        "nccl_hcas": "",
        "ucx_devices": "eth1",
    }


def test_an_hca_under_the_same_switch_is_nearest(hgx: Machine) -> None:
    assert [hgx.near(gpu) for gpu in range(3)] == [["mlx5_0"], ["mlx5_1"], ["mlx5_2"]]


def test_an_hca_of_the_same_socket_is_next(hgx: Machine) -> None:
    assert hgx.near(3) == ["mlx5_2", "mlx5_10"]


def test_an_engine_gets_the_hcas_near_any_of_its_gpus(hgx: Machine) -> None:
    assert hgx.near(0, 1) == ["mlx5_0", "mlx5_1"]
    assert hgx.near() == hgx.names()


def test_only_nvidia_gpus_are_counted(machine: Machine) -> None:
    machine.gpu("a/0000:03:00.0", vendor="0x1a03", kind="0x030000")  # the console
    machine.gpu("a/0000:02:00.0", kind="0x068000")  # an NVSwitch
    machine.gpu("a/0000:04:00.0")
    assert [path.name for path in fabric.find_gpus(machine.root)] == ["0000:04:00.0"]


def test_the_interface_is_the_one_that_owns_the_address() -> None:
    interfaces = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    assert fabric.interface_of("10.1.0.1", interfaces) == "ib0"
    assert fabric.interface_of("10.9.9.9", interfaces) == fabric.interface_of("127.0.0.1", interfaces) == ""
    assert fabric.own_interfaces()["lo"] == "127.0.0.1"
