"""Tensor transfer between several ranks, as threads of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from benchmarks.support.ports import free_port
from primeslurm.wire.transport.rendezvous_store import serve_store
from primeslurm.wire.weight_transfer.catalogue import Experts, Named, TensorInfo, outgoing, pack, stacked
from primeslurm.wire.weight_transfer.collective import Channel, Group, Store, TransferError, receive
from primeslurm.wire.weight_transfer.messages import TransferSession

CPU = torch.device("cpu")
LATE_S = 300.0
EXPERT = "layers.0.mlp.experts.{}.up_proj.weight"


def tensors() -> dict[str, torch.Tensor]:
    """Odd sizes and mixed dtypes, so that every message needs padding."""
    generator = torch.Generator().manual_seed(0)  # its own: threads draw at the same time
    draw = partial(torch.randn, generator=generator)
    actual = {EXPERT.format(i): draw(3, 5).bfloat16() for i in range(4)}
    actual |= {EXPERT.format(i) + "_scale_inv": draw(1, 1) for i in range(4)}
    return actual | {"layers.0.norm.weight": draw(7), "head.weight": draw(3, 3).to(torch.float8_e4m3fn)}


def share(sender: int, senders: int) -> list[Named]:
    """Return a sender's tensors. Experts alternate between senders, so that receivers have to reorder them."""
    return list(stacked(list(tensors().items())[sender::senders]))


def catalogue(senders: int) -> list[list[TensorInfo]]:
    infos = [
        TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sender, experts)
        for sender in range(senders)
        for name, tensor, experts in share(sender, senders)
    ]
    return [[info for info in infos if "head" in info.name], [info for info in infos if "head" not in info.name]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    port = free_port()
    store = serve_store("127.0.0.1", port)
    yield f"127.0.0.1:{port}"
    del store  # it ends with its last reference


def send(session: TransferSession, rank: int, address: str) -> None:
    channel = Channel(session, rank, Store(address, LATE_S), CPU, LATE_S)
    mine = {item.name: item.tensor for item in share(rank, session.senders)}
    try:
        for layer in catalogue(session.senders):
            messages = [
                (receiver, pack(message, mine, CPU))
                for receiver in channel.receivers
                for message in outgoing(layer, rank, channel.experts(receiver))
            ]
            channel.send(messages)
        channel.finish()
    except TransferError as error:
        channel.fail(str(error))
        raise
    channel.close()


def take(session: TransferSession, rank: int, address: str, experts: Experts) -> dict[str, torch.Tensor]:
    store = Store(address, LATE_S)
    channel = Channel(session, rank, store, CPU, LATE_S, experts)
    received = list(receive(channel, store.catalogue(), session.senders, experts, CPU))
    actual = {name: tensor.clone() for item in received for name, tensor in item.each()}
    channel.close()
    return actual


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def test_each_receiver_gets_the_tensors_it_needs(address: str) -> None:
    session = TransferSession("each", senders=2, size=4)
    Store(address, LATE_S).put_catalogue(catalogue(2))
    one, other = frozenset({0, 3}), None
    *_, some, all_ = together(
        lambda: send(session, 0, address),
        lambda: send(session, 1, address),
        lambda: take(session, 2, address, one),
        lambda: take(session, 3, address, other),
    )
    everything = tensors()
    assert set(all_.result()) == set(everything)
    assert set(everything) - set(some.result()) == {
        EXPERT.format(i) + end for i in (1, 2) for end in ("", "_scale_inv")
    }
    for name, tensor in (some.result() | all_.result()).items():
        assert tensor.dtype == everything[name].dtype
        assert torch.equal(tensor.view(torch.uint8), everything[name].view(torch.uint8)), name


def test_failed_rank_fails_the_others(address: str) -> None:
    session = TransferSession("fails", senders=1, size=3)
    Store(address, LATE_S).put_catalogue(catalogue(1))

    def leave() -> None:
        Channel(session, 2, Store(address, LATE_S), CPU, LATE_S).fail("rank 2: out of memory")

    begun = time.monotonic()
    sending, *_ = together(lambda: send(session, 0, address), lambda: take(session, 1, address, None), leave)
    with pytest.raises(TransferError, match=r"out of memory|reset|closed"):
        sending.result()
    assert time.monotonic() - begun < LATE_S, "nobody waited for the time-out"


def meet(
    address: str, session: TransferSession, kept: list[Group | None], tensor: float
) -> tuple[list[Group | None], list[bool]]:
    """Send a tensor from rank 0 to all others. Return the groups to keep, and whether each rank made a new one."""

    def one(rank: int) -> tuple[Group, bool]:
        channel = Channel(session, rank, Store(address, LATE_S), CPU, LATE_S, kept=kept[rank])
        if rank:
            data = torch.zeros(8, dtype=torch.uint8)
            channel.receive([(0, data)])
            channel.finish()
            assert data.view(torch.float64).item() == tensor
        else:
            data = torch.tensor([tensor], dtype=torch.float64).view(torch.uint8)
            channel.send([(receiver, data) for receiver in channel.receivers])
            channel.finish()
        return channel.close(), channel.made_group

    groups, made = zip(
        *(end.result() for end in together(*(partial(one, r) for r in range(session.size)))), strict=True
    )
    return list(groups), list(made)


def test_group_is_made_once_for_the_same_members(address: str) -> None:
    kept: list[Group | None] = [None] * 3
    for number in range(3):
        kept, made = meet(address, TransferSession(f"same-{number}", 1, 3), kept, number + 0.5)
        assert made == [number == 0] * 3
    assert {group.session for group in kept if group} == {"same-0"}


@pytest.mark.parametrize("change", ["restarted", "left", "joined", "swapped", "mixed"])
def test_changed_members_make_a_new_group(change: str, address: str) -> None:
    first, _ = meet(address, TransferSession(f"{change}-1", 1, 3), [None] * 3, 1.5)
    groups: dict[str, list[Group | None]] = {
        "restarted": [*first[:2], None],
        "left": first[:2],
        "joined": [*first, None],
        "swapped": [first[0], first[2], first[1]],
    }
    if change == "mixed":  # one engine was updated in another session meanwhile
        other, _ = meet(address, TransferSession("other", 1, 3), [None] * 3, 2.5)
        groups[change] = [*first[:2], other[2]]
    kept = groups[change]
    after, made = meet(address, TransferSession(f"{change}-2", 1, len(kept)), kept, 3.5)
    assert made == [True] * len(kept)
    assert not any(group.process_group for group in kept if group), "the old groups are aborted"
    assert {group.session for group in after if group} == {f"{change}-2"}


def test_group_of_a_failed_session_is_aborted(address: str) -> None:
    kept, _ = meet(address, TransferSession("sound", 1, 2), [None] * 2, 1.5)
    session = TransferSession("unsound", 1, 2)

    def fail() -> None:
        Channel(session, 1, Store(address, LATE_S), CPU, LATE_S, kept=kept[1]).fail("out of memory")

    def wait() -> None:
        channel = Channel(session, 0, Store(address, LATE_S), CPU, LATE_S, kept=kept[0])
        try:
            channel.receive([(1, torch.zeros(8, dtype=torch.uint8))])
            channel.finish()
        except TransferError as error:
            channel.fail(str(error))
            raise

    failing, waiting = together(fail, wait)
    failing.result()
    with pytest.raises(TransferError, match=r"out of memory|reset|closed"):
        waiting.result()
    assert not any(group.process_group for group in kept if group)


def test_group_is_aborted_if_a_member_does_not_arrive(address: str) -> None:
    kept, _ = meet(address, TransferSession("came", 1, 2), [None] * 2, 1.5)
    with pytest.raises(TransferError, match="waiting for 2 ranks"):
        Channel(TransferSession("stays away", 1, 2), 0, Store(address, LATE_S), CPU, 0.5, kept=kept[0])
    assert kept[0] and kept[0].process_group is None


def test_wait_for_missing_rank_times_out(address: str) -> None:
    with pytest.raises(TransferError, match="waiting for 2 ranks"):
        Channel(TransferSession("alone", senders=1, size=2), 0, Store(address, LATE_S), CPU, 0.5)


@pytest.mark.parametrize("came", [False, True])
def test_rank_killed_while_connecting_does_not_block_the_others(came: bool, address: str) -> None:
    session = TransferSession(f"killed-{came}", senders=1, size=2)
    if came:
        dist.PrefixStore(session.id, Store(address, LATE_S).store).set("experts/1", msgspec.msgpack.encode(None))
    with pytest.raises(TransferError, match="waiting for 2 ranks"):
        Channel(session, 0, Store(address, LATE_S), CPU, 600, arrive_s=0.5)


def test_no_rank_waits_for_a_rank_reported_lost(address: str) -> None:
    """Before and after it has connected. Otherwise the others would wait for the timeout."""
    for came in (False, True):
        session = TransferSession(f"gone-{came}", senders=2, size=4)
        if came:
            dist.PrefixStore(session.id, Store(address, LATE_S).store).set("experts/3", msgspec.msgpack.encode(None))
        known = iter(["", "", "rank 3: its node is gone"])
        knowing = partial(Channel, arrive_s=500, lost=lambda known=known: next(known, "asked again"))
        opened = together(
            lambda s=session: Channel(s, 0, Store(address, LATE_S), CPU, 600, arrive_s=500),
            lambda s=session, knowing=knowing: knowing(s, 1, Store(address, LATE_S), CPU, 600),
            lambda s=session: Channel(s, 2, Store(address, LATE_S), CPU, 600, arrive_s=500),
        )
        for end in opened:
            with pytest.raises(TransferError, match="rank 3: its node is gone"):
                end.result()


def test_missing_trainer_is_named_and_times_out() -> None:
    with pytest.raises(TransferError, match=r"127\.0\.0\.1:1:"):
        Store("127.0.0.1:1", 600, arrive_s=0.5)
