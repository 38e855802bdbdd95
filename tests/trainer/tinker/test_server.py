"""The end of the service."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn

from primeslurm.base.errors import UsageError
from primeslurm.tinker import backbone as backbone_module
from primeslurm.tinker import server as server_module
from primeslurm.tinker.backbone import Backbone
from primeslurm.tinker.store import TinkerStore
from primeslurm.trainer.distributed import world as world_module
from primeslurm.trainer.distributed.world import World


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_service_cleanly(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    closed: list[str] = []

    async def interrupted(_: uvicorn.Server) -> None:
        signal.raise_signal(number)

    def killed(*_: object) -> None:
        raise AssertionError("the default handler of SIGTERM would end the process")

    monkeypatch.setattr(uvicorn.Server, "main_loop", interrupted)
    monkeypatch.setattr(backbone_module, "Backbone", lambda *_: backbone)
    monkeypatch.setattr(world_module, "alone", lambda: SimpleNamespace(close=lambda: closed.append("world")))
    previous = signal.signal(signal.SIGTERM, killed)
    try:
        server_module.prepare("127.0.0.1", 0, tmp_path / "data").serve("model", 16)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert closed == ["world"]
    TinkerStore(tmp_path / "data").close()  # it is free again


def test_rank_above_the_hidden_size_is_refused(dense_model: Path, world: World) -> None:
    with pytest.raises(UsageError, match="--max-rank = 100000: is above the model's hidden size"):
        Backbone(str(dense_model), 100000, world)
