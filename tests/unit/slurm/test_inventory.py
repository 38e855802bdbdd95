"""Installed parts: found without imports, and compared with the locked versions."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.base.errors import ClusterError
from primeslurm.cli.verbs.doctor import difference_lines
from primeslurm.node.preflight import installed
from primeslurm.recipe import Site
from primeslurm.slurm import inventory
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.inventory import REQUIRED, InstalledDifference, differences, locked_versions

GOOD: dict[str, str | None] = dict.fromkeys(REQUIRED, "1.0") | {"deep_ep": None, "gpus": None}


def test_this_host_says_what_it_has_without_importing_it() -> None:
    code = (
        "import sys, primeslurm.node.preflight.installed as i; i.installed(); "
        "print(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    done = subprocess.run([sys.executable, "-m", installed.__name__], capture_output=True, text=True, check=True)
    parts = json.loads(done.stdout)["parts"]
    assert parts["python"] == platform.python_version()
    assert parts["torch"] and parts["nixl"]
    assert set(installed.PACKAGES) < set(parts)


def test_the_first_library_on_the_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libucp.so.0").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}/b:{tmp_path}/a")
    assert installed.installed()["libucp"] == f"{tmp_path}/b/libucp.so.0"


def test_unreadable_answer_of_a_node_is_an_error() -> None:
    assert inventory._parse('slurmstepd: hello\n{"node": "n1", "parts": {"nixl": null}}') == {"n1": {"nixl": None}}
    with pytest.raises(ClusterError, match="Expected `object`"):
        inventory._parse('{"node": "n1", "parts": ["nixl"]}')


def test_an_optional_part_may_be_missing_but_not_of_another_version() -> None:
    assert differences({"n1": GOOD}, {}, []) == []
    found = differences({"n1": GOOD | {"deep_ep": "2.0"}}, {"deep_ep": "2.1"}, [])
    assert found == [InstalledDifference("n1", "deep_ep", "2.0", "2.1", required=False)]


@pytest.mark.parametrize(("mooncake", "well"), [("13", True), (None, True), ("12", False)])
def test_mooncake_is_of_the_cuda_that_torch_has(mooncake: str | None, well: bool) -> None:
    parts = GOOD | {"cuda of torch": "13.0", "cuda of mooncake": mooncake}
    expected = [] if well else [InstalledDifference("n1", "cuda of mooncake", "12", "13", required=True)]
    assert differences({"n1": parts}, {}, []) == expected


def test_the_cuda_of_mooncake_is_read_from_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    assert installed._cuda_of_mooncake() is None
    for content, cuda in ((b"\0libcudart.so.13\0", "13"), (b"\0libcudart.so.12\0", "12"), (b"\0libc.so.6\0", None)):
        (package / "engine.so").write_bytes(content)
        assert installed._cuda_of_mooncake() == cuda


def test_the_gpu_lock_has_one_mooncake_of_the_cuda_of_its_torch() -> None:
    pins = locked_versions("cuda")
    assert [name for name in pins if name.startswith("mooncake")] == ["mooncake-transfer-engine-cuda13"]
    assert pins["nvidia-cuda-runtime"].startswith("13.") and "nvidia-nccl-cu13" in pins


def test_missing_required_parts_are_named_by_node() -> None:
    nodes = {
        "n1": GOOD | {"vllm": None},
        "n2": GOOD | {"vllm": "0.31"},
        "n3": {"node": "drain"},
        "n4": {"node": "maint"},
    }
    assert differences(nodes, {"vllm": "0.32"}, []) == [
        InstalledDifference("n1", "vllm", None, "0.32", required=True),
        InstalledDifference("n2", "vllm", "0.31", "0.32", required=True),
        InstalledDifference("n3", "node", "drain", "up", required=True),
        InstalledDifference("n4", "node", "maint", "up", required=False),
    ]
    assert [each.part for each in differences({"n1": GOOD}, {}, ["n1"])] == ["gpus"]


def test_the_lock_is_the_requirements_and_the_manifests() -> None:
    assert locked_versions("cpu")["vllm-router"] == locked_versions("cuda")["vllm-router"] == "0.1.17"
    assert locked_versions("cpu")["ucx"]


def test_nodes_are_asked_under_the_site_s_account_and_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        "sinfo": "echo 'n1|gpu|resv'; echo 'n2|gpu|resv'; echo 'n3|gpu|idle'; echo 'n4|gpu|drain*'",
        "scontrol": "echo 'ReservationName=lab Nodes=n[1,4] Flags=SPEC_NODES State=ACTIVE'",
        "srun": """printf '{"node": "n1", "parts": {"srun": "%s"}}' "$*" """,
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    options = {"account": "lab9", "qos": "high", "reservation": "lab", "extra": ["--wckey=x"]}
    kind = {"partition": "gpu", "gpus": 8, "cpus": 96, "mem_per_cpu": "4G"}
    found = inventory.on_nodes(
        Site(schema=1, name="s", nodes={"default": kind}, slurm=options, python="/opt/python"), SlurmClient(), None
    )
    assert set(found) == {"n1", "n4"}, "the others are not in the reservation"
    assert found["n4"] == {"node": "drain*"}
    words = str(found["n1"]["srun"]).split()
    assert words[:4] == ["--job-name=primeslurm-doctor", "--partition=gpu", "--nodelist=n1", "--nodes=1"]
    assert {"--account=lab9", "--qos=high", "--reservation=lab", "--wckey=x", "--mem-per-cpu=256M"} <= set(words)
    assert words[-3:] == ["/opt/python", "-m", "primeslurm.node.preflight.installed"]


def test_nodes_with_one_difference_share_a_line() -> None:
    wrong = [InstalledDifference(f"n{i}", part, None, "0.32", required=True) for i in (1, 2) for part in ("vllm", "x")]
    assert difference_lines(wrong) == ["n[1-2]: vllm is missing, locked 0.32", "n[1-2]: x is missing, locked 0.32"]
