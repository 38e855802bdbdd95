"""Published and sent policies are exact in every layout, with no unnecessary gathers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from benchmarks.support.ports import free_port
from primeslurm.orchestrator.weight_updates.sessions import TransferSessions
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weight_senders import filesystem_sender
from primeslurm.trainer.weight_senders.filesystem_sender import FilesystemTransfer, Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.link import trainer_link
from primeslurm.wire.link.messages import Answer, Request
from primeslurm.wire.link.orchestrator_link import OrchestratorLink
from primeslurm.wire.weight_transfer import collective, filesystem, messages
from primeslurm.wire.weight_transfer.catalogue import Experts
from tests.trainer.as_released import assert_stored_alike, to_fp8
from tests.trainer.conftest import finish, make_recipe, start_ranks, tensors
from tests.trainer.families import COMMON, EXPERTS, Case, write

RANKS = 4
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {},
    "fsdp-ep": {"ep": 2},  # experts are sharded over two meshes
    "hsdp-ep": {"dp_replicate": 2, "ep": 2},
    "cp-ep": {"cp": 2, "ep": 4},
    "few-experts": {"ep": 2},  # fewer experts than ranks: each expert is sharded
    "fp8": {"ep": 2},  # from a checkpoint in FP8
}


def take(place: messages.SessionPlace, worker: int, experts: Experts) -> dict[str, torch.Tensor]:
    session = messages.TransferSession(place.session, place.senders, place.size)
    store, cpu = collective.Store(place.store, 60), torch.device("cpu")
    channel = collective.Channel(session, place.first_rank + worker, store, cpu, 60, experts)
    received = collective.receive(channel, store.catalogue(), session.senders, experts, cpu)
    actual = {name: tensor.clone() for item in received for name, tensor in item.each()}
    channel.close()
    return actual


class Orchestrator:
    """A fake orchestrator with two workers per session, each with half of the experts."""

    def __init__(self, experts: list[int]) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.received: list[list[dict[str, torch.Tensor]]] = []
        self._sessions = TransferSessions(workers=2, timeout_s=60)
        self._experts = iter(experts)
        self._wanting = 0

    async def run(self, command: list[str]) -> list[str]:
        serving = asyncio.create_task(OrchestratorLink(self.address, self._handle).serve())
        ranks = start_ranks(RANKS, *command)
        outputs = await asyncio.to_thread(finish, ranks)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return outputs

    async def _handle(self, request: Request) -> Answer:
        assert isinstance(request, messages.OfferTransfer)
        if not request.done and not self._wanting:
            self._wanting = 1
            self._sessions.expect(request.version)
            self._task = asyncio.create_task(self._take(request.version))
        return await self._sessions.answer(request, lambda: self._wanting, 4)

    async def _take(self, version: int) -> None:
        place = await self._sessions.join(version, str(id(self)))
        half = next(self._experts) // 2
        held = (frozenset(range(half)), frozenset(range(half, 2 * half)))
        workers = [asyncio.to_thread(take, place, worker, experts) for worker, experts in enumerate(held)]
        self.received.append(list(await asyncio.gather(*workers)))
        self._wanting = 0


async def test_every_layout_transfers_the_loaded_policy(tmp_path: Path) -> None:
    models = {name: tmp_path / f"model-{name}" for name in ("many", "few", "fp8")}
    write(Case("many", lambda: Qwen3MoeConfig(**COMMON, **EXPERTS)), models["many"])
    write(Case("few", lambda: Qwen3MoeConfig(**COMMON, **EXPERTS | {"num_experts": 2})), models["few"])
    write(Case("fp8", lambda: Qwen3MoeConfig(**COMMON | {"hidden_size": 192}, **EXPERTS)), models["fp8"])
    to_fp8(models["fp8"])
    sources = {name: models[{"few-experts": "few", "fp8": "fp8"}.get(name, "many")] for name in LAYOUTS}
    for name, parallelism in LAYOUTS.items():
        recipe = make_recipe(sources[name], trainer={"parallelism": parallelism})
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(recipe.model_dump_json(by_alias=True))
    orchestrator = Orchestrator([2 if name == "few-experts" else 8 for name in LAYOUTS])
    directories = [str(tmp_path / name) for name in LAYOUTS]
    outputs = await orchestrator.run(["tests.trainer.transferring", orchestrator.address, *directories])

    printed = [json.loads(line.split(" ", 1)[1]) for out in outputs for line in out.splitlines() if "GATHERED" in line]
    for (name, source), received in zip(sources.items(), orchestrator.received, strict=True):
        original = tensors(source)
        published = filesystem.version_dir(tmp_path / name, 1)
        assert filesystem.damage(published) == []
        assert len(list(published.glob("*.safetensors"))) == RANKS, "every rank writes its share"
        delta = filesystem.version_dir(tmp_path / name, 2)
        assert filesystem.base_of(delta) == (published, 1), "every rank finds its tensors in its own files"
        assert tensors(delta) == {}, "nothing has changed"
        actual = tensors(published)
        index = json.loads((published / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in actual.values())}
        for whole in (actual, received[0] | received[1]):
            assert_stored_alike(whole, original)
        assert any(key not in received[0] for key in original), "experts of the other worker are not sent"
        largest = max(count for layout, count in printed if layout == name)
        experts = name == "few-experts"
        allowed = [tensor.numel() for key, tensor in original.items() if experts or ".experts." not in key]
        assert largest <= max(allowed), f"{name}: a rank gathered more than a tensor of its own"


def test_failed_announcement_is_repeated(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator records a policy before it tells engines, and answers with its error if it cannot."""
    answers = [trainer_link.LinkError("[Errno 30] Read-only file system: 'progress.bin'")] * 2

    class Link:
        def announce(self, version: int, path: str) -> int:
            if answers:
                raise answers.pop()
            return version

    monkeypatch.setattr("primeslurm.base.files.sleep", lambda _: None)
    FilesystemTransfer(None, tmp_path, "", Link(), world)._announce(3, "v3")  # type: ignore[arg-type]
    assert not answers
    answers.append(trainer_link.LinkError("no such version"))
    with pytest.raises(trainer_link.LinkError, match="no such version"):
        FilesystemTransfer(None, tmp_path, "", Link(), world)._announce(3, "v3")  # type: ignore[arg-type]


@pytest.mark.parametrize("file_bytes", [2**31, 2**15])
def test_step_may_change_the_policy_while_it_is_written(
    file_bytes: int, moe_model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policies that fit into one file are copied. Larger ones are written before `begin` returns."""
    monkeypatch.setattr(filesystem_sender, "FILE_BYTES", file_bytes)
    policy = build(make_recipe(moe_model), world)
    publisher = Publisher(policy, tmp_path, Encoding(torch.bfloat16, fp8=True), 9, world)  # of three dtypes
    expected = tensors(publisher.publish(1))
    write = publisher.begin(2, world)
    assert filesystem.published(tmp_path) == ([1] if file_bytes == 2**31 else [1, 2])
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
    actual = tensors(write())
    assert filesystem.damage(filesystem.version_dir(tmp_path, 2)) == []
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name].float(), tensor.float()) for name, tensor in expected.items())
    changed = tensors(publisher.begin(3, world)())
    assert not any(torch.equal(changed[name].float(), tensor.float()) for name, tensor in expected.items())


async def test_restarted_trainer_keeps_versions_that_engines_may_read(
    moe_model: Path, world: World, tmp_path: Path
) -> None:
    publisher = Publisher(build(make_recipe(moe_model), world), tmp_path, Encoding(torch.float32), 9, world)
    address = f"tcp://127.0.0.1:{free_port()}"
    told: list[int] = []

    async def handle(request: Request) -> Answer:
        assert isinstance(request, messages.NewPolicy)
        told.append(request.version)
        return Answer("ok", version=max(told))

    def train(committed: int, last: int) -> None:
        by_files = FilesystemTransfer(publisher, tmp_path, str(moe_model), trainer_link.TrainerLink(address), world)
        by_files.resume(committed)
        for version in range(committed + 1, last + 1):
            by_files.transfer(version, lambda event: None)
        by_files.finish()

    def written() -> dict[int, int]:
        actual = filesystem.published(tmp_path)
        return {v: (filesystem.version_dir(tmp_path, v) / filesystem.MANIFEST).stat().st_mtime_ns for v in actual}

    serving = asyncio.create_task(OrchestratorLink(address, handle).serve())
    await asyncio.to_thread(train, 0, 3)
    before = written()
    await asyncio.to_thread(train, 1, 4)
    assert told == [0, 1, 2, 3, 1, 4]
    after = written()
    assert list(after) == [1, 2, 3, 4] and after | before == after
    told.clear()  # a new attempt
    (filesystem.version_dir(tmp_path, 1) / filesystem.MANIFEST).unlink()  # it was killed while it deleted this one
    await asyncio.to_thread(train, 2, 2)
    assert list(written()) == [2] and not filesystem.version_dir(tmp_path, 1).exists()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
