"""The names of adapters that an engine remembers, and their copies."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primeslurm.inference.weight_receivers.named_adapters import (
    IDLE_S,
    AdapterError,
    AdapterLoadError,
    MissingAdapterError,
    NamedAdapters,
    copy_adapter,
    load_error,
    unusable,
)


def write_adapter(directory: Path, value: bytes = b"abcd") -> None:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    header = json.dumps({"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    tensors = len(header).to_bytes(8, "little") + header + value
    (directory / "adapter_model.safetensors").write_bytes(tensors)


class Loads:
    """The engine's side: records what it loads."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []

    async def __call__(self, name: str, number: int, path: str) -> Any:
        assert (Path(path) / "adapter_config.json").exists()
        self.loaded.append((name, number))
        await asyncio.sleep(0)
        if name == "wrong":
            raise AdapterError("a wrong shape")
        return SimpleNamespace(lora_path=path)


async def test_least_recently_used_names_are_forgotten_unless_requests_use_them(tmp_path: Path) -> None:
    now, loads = 0.0, Loads()
    for name in "abcd":
        write_adapter(tmp_path / name)
    adapters = NamedAdapters(tmp_path, loads, remembered=2, clock=lambda: now)
    requests = {name: await adapters.resolve(name) for name in "abc"}
    assert sorted(adapters) == ["a", "b", "c"], "a name that was used a moment ago stays"
    with adapters.using("b"):
        now += IDLE_S + 1
        assert adapters["c"] is requests["c"]
        await adapters.resolve("d")
        assert sorted(adapters) == ["b", "c", "d"]
        assert not Path(requests["a"].lora_path).exists() and Path(requests["b"].lora_path).exists()
    again = await adapters.resolve("a")
    assert again.lora_path != requests["a"].lora_path and loads.loaded[-1] == ("a", 5)
    now += IDLE_S + 1
    assert await adapters.resolve("b") is requests["b"] and sorted(adapters) == ["a", "b", "c", "d"]


async def test_requests_at_the_same_time_load_an_adapter_once(tmp_path: Path) -> None:
    loads = Loads()
    for name in ("one", "two", "wrong"):
        write_adapter(tmp_path / name)
    adapters = NamedAdapters(tmp_path, loads)
    first, second, other = await asyncio.gather(*map(adapters.resolve, ("one", "one", "two")))
    assert first is second is not other and len(loads.loaded) == 2
    results = await asyncio.gather(*map(adapters.resolve, ("wrong", "wrong")), return_exceptions=True)
    assert all("a wrong shape" in str(error) for error in results) and len(loads.loaded) == 3
    with pytest.raises(AdapterError, match="a wrong shape"):
        await adapters.resolve("wrong")
    assert len(loads.loaded) == 4, "the next request tries again"


@pytest.mark.parametrize("name", ["", "/etc", "a/../b", "..", "a//b", "a/", "./a", "a\n", ".a", "ä", "a" * 501])
def test_other_names_than_plain_relative_paths_are_refused(tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path / "b")
    with pytest.raises(AdapterError, match="no name of an adapter"):
        copy_adapter(tmp_path, name, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 7, b"\xff" * 9, (2).to_bytes(8, "little") + b"[]", b"x" * 100])
def test_damaged_files_are_refused(tmp_path: Path, damage: bytes) -> None:
    write_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(damage)
    with pytest.raises(MissingAdapterError, match="is incomplete"):
        copy_adapter(tmp_path, "a", tmp_path / "copy", within_s=0)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()  # it is not visible yet, or is being removed
    with pytest.raises(MissingAdapterError, match=r"adapter_model\.safetensors is missing"):
        copy_adapter(tmp_path, "a", tmp_path / "copy", within_s=0)
    with pytest.raises(MissingAdapterError, match="there is no such adapter"):
        copy_adapter(tmp_path, "b", tmp_path / "copy", within_s=0)


async def test_full_disk_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    adapters = NamedAdapters(tmp_path, Loads())
    adapters._copies.path.rmdir()  # copies cannot be written
    with pytest.raises(AdapterLoadError, match="FileNotFoundError"):
        await adapters.resolve("a")
    adapters._copies.path.mkdir()
    assert await adapters.resolve("a")


@pytest.mark.parametrize(("kind", "expected"), [(ValueError, AdapterError), (MemoryError, AdapterLoadError)])
def test_only_refusals_of_a_worker_are_final(kind: type[Exception], expected: type[AdapterError]) -> None:
    with pytest.raises(kind) as raised, unusable():
        raise kind("a fault")
    # vLLM passes the text on, in an error of its own.
    assert type(load_error("a", RuntimeError(f"Call to add_lora method failed: {raised.value}"))) is expected


async def test_copies_of_a_killed_engine_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_adapter(tmp_path / "a")
    running = NamedAdapters(tmp_path, Loads())
    request = await running.resolve("a")
    code = f"""
import os
from pathlib import Path
from primeslurm.inference.weight_receivers.named_adapters import NamedAdapters
(NamedAdapters(Path({str(tmp_path)!r}), None)._copies.path / "1").mkdir()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert len([*tmp_path.glob("primeslurm-adapters-*/1")]) == 2
    NamedAdapters(tmp_path, Loads())
    assert [*tmp_path.glob("primeslurm-adapters-*/1")] == [Path(request.lora_path)]
