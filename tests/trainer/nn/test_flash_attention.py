"""Selection of FlashAttention. tests/gpu/test_parallel.py tests its results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch.nn.attention import _registry, activate_flash_attention_impl

from primeslurm.nn.kernels import flash_attention


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A fake of vLLM's kernels, which return more values than torch accepts."""
    fake = ModuleType(flash_attention.KERNELS)
    three = tuple(torch.full((1,), float(i)) for i in range(3))
    fake._flash_attn_fwd = lambda *args, **options: (*three[:2], None, None)  # type: ignore[attr-defined]
    fake._flash_attn_bwd = lambda *args, **options: three  # type: ignore[attr-defined]
    for depth in (1, 2, 3):
        package = ".".join(flash_attention.KERNELS.split(".")[:depth])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, flash_attention.KERNELS, fake)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", pytest.fail)
    flash_attention._kernels.cache_clear()
    yield fake
    flash_attention._kernels.cache_clear()


def test_older_gpus_use_torchs_flash_attention() -> None:
    assert flash_attention.best(lambda: None, pytest.fail) is None


def test_missing_package_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "KERNELS", "no_such_package.interface")
    assert flash_attention.best(lambda: "FA3", pytest.fail) is None


def test_kernels_of_vllm_are_registered_for_torch(kernels: ModuleType) -> None:
    modules: list[str] = []
    assert flash_attention.best(lambda: "FA3", modules.append) == "FA4"
    assert not modules
    activate_flash_attention_impl("FA4")
    assert modules == [flash_attention.__name__]
    assert [float(t) for t in flash_attention._flash_attn_fwd()] == [0, 1]
    assert [float(t) for t in flash_attention._flash_attn_bwd()] == [0, 1, 2]
