"""A policy sent from trainer ranks to engine workers, tensor by tensor: NCCL between GPUs, gloo between CPUs.

Each update is a session: a process group of its own, with the senders (all trainer ranks) first and the receivers (the
workers of the engines that take part) after them. They meet in the store of the trainer's rank 0. What is sent is
described once in the catalogue, layer by layer, with the sender of every tensor; each receiver says which experts it
holds. From these two, both ends know every message, and nothing else has to be negotiated:

    for each layer, for each sender: one message with what every receiver needs, one with the receiver's own experts

Whoever fails says so in the store and leaves; the others then fail too, instead of waiting. For one that was killed, a
sender says it, which asks the orchestrator while it waits. No wait is longer than the session's time-out.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from primeslurm.wire.decoding import DamagedError, value
from primeslurm.wire.transport import rendezvous
from primeslurm.wire.weight_transfer.catalogue import Catalogue, Experts, Named, buffer, outgoing, unpack
from primeslurm.wire.weight_transfer.messages import TransferSession

_PREFIX = "primeslurm/weights"
_POLL_S = 0.0005
ARRIVE_S = 120.0
"""Longest wait for everybody to come, who need the seconds that a pause takes. Trainer and other engines stand still
meanwhile."""
LARGEST_CATALOGUE = 256 << 20
"""Bytes. A tensor takes about a hundred, and a stack of experts some hundreds more; there are some ten thousand."""
_LOOK_S = 1.0
"""How often a wait looks whether somebody else has failed."""


class TransferError(RuntimeError):
    """A session failed: somebody did not come, left, or took too long."""


class Store:
    """What senders and receivers tell one another before and beside the tensors.

    Args:
        address: host:port of the trainer's store.
        timeout_s: longest wait for anything in it.
        arrive_s: longest wait for it to be there.

    Raises:
        TransferError: nobody answers there.
    """

    def __init__(self, address: str, timeout_s: float, arrive_s: float = ARRIVE_S) -> None:
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=min(timeout_s, arrive_s))  # a trainer that was killed is not there at all
        try:
            way = rendezvous.passage(host, int(port), timeout.total_seconds())
            store = dist.TCPStore("127.0.0.1", way, is_master=False, timeout=timeout)
        except RuntimeError as error:  # includes torch's own kinds
            raise TransferError(f"{address}: {error}") from error
        self.store = dist.PrefixStore(_PREFIX, store)

    def put_catalogue(self, catalogue: Catalogue) -> None:
        """Describe what every session sends."""
        packed = zlib.compress(msgspec.msgpack.encode(catalogue), 1)
        self.store.set("catalogue", packed)  # type: ignore[arg-type]  # torch's stub knows str alone

    def catalogue(self) -> Catalogue:
        """Wait for what every session sends.

        Raises:
            TransferError: the trainer did not describe it in time, or what is there is no catalogue.
        """
        with _waiting_for("the catalogue"):
            packed = self.store.get("catalogue")
        return unpacked(packed)


def unpacked(packed: bytes) -> Catalogue:
    """Read a catalogue.

    Raises:
        TransferError: it is none. Whoever reaches the store can write into it.
    """
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(packed, LARGEST_CATALOGUE)
        if not unpacking.eof:
            raise DamagedError(f"it is cut off, or longer than {LARGEST_CATALOGUE} bytes")
        return value(raw, Catalogue)
    except (zlib.error, DamagedError) as error:
        raise TransferError(f"the catalogue cannot be read: {error}") from error


class Channel:
    """This process's end of a session.

    Args:
        rank: place in the session.
        experts: which experts this rank holds, if it receives.
        arrive_s: longest wait for everybody to come.
        lost: of a sender, who of the session is gone; "" if nobody is. Asked now and then while something is waited
            for.

    Raises:
        TransferError: not everybody came in time, or somebody is gone.
    """

    def __init__(
        self,
        session: TransferSession,
        rank: int,
        store: Store,
        device: torch.device,
        timeout_s: float,
        experts: Experts = None,
        arrive_s: float = ARRIVE_S,
        lost: Callable[[], str] = lambda: "",
    ) -> None:
        self._lost = lost
        self._timeout = timedelta(seconds=timeout_s)
        self._arriving = min(self._timeout, timedelta(seconds=arrive_s))
        self._store = dist.PrefixStore(session.id, store.store)
        self._device = device
        self.receivers = range(session.senders, session.size)
        with _waiting_for(f"{session.size} ranks"):
            # Everybody is there before anybody connects, and still there when the last one has come: NCCL's own
            # rendezvous has no time-out.
            self._meet("experts", rank, session.size, msgspec.msgpack.encode(experts))
            self._meet("present", rank, session.size, b"")
            self._group = _group(self._store, rank, session.size, device, self._timeout)

    def experts(self, receiver: int) -> Experts:
        """Return the experts that a receiver holds. Raises TransferError."""
        try:
            found: Experts = value(self._store.get(f"experts/{receiver}"), Experts)  # type: ignore[arg-type]
        except DamagedError as error:
            raise TransferError(f"the experts of rank {receiver} cannot be read: {error}") from error
        return found

    def send(self, messages: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Send (receiver, bytes) in this order; return when they are out. Raises TransferError."""
        self._wait(lambda: [self._group.send([data], receiver, 0) for receiver, data in messages])

    def receive(self, messages: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Fill (sender, bytes) in this order. Raises TransferError."""
        self._wait(lambda: [self._group.recv([data], sender, 0) for sender, data in messages])

    def fail(self, reason: str) -> None:
        """Leave, and have the others fail as well."""
        try:
            self._store.set("failed", reason)
        finally:
            self._group.abort()
            del self._group  # gloo closes connections with the last reference: the others notice that at once

    def close(self) -> None:
        """Leave after everything was sent or received."""
        self._group.shutdown()

    def _meet(self, where: str, rank: int, size: int, word: bytes) -> None:
        """Leave a word for the others, and wait until all have left theirs."""
        self._store.set(f"{where}/{rank}", word)  # type: ignore[arg-type]  # torch's stub knows str alone
        words = [f"{where}/{other}" for other in range(size)]
        deadline = time.monotonic() + self._arriving.total_seconds()
        while not self._all_came(words, deadline - time.monotonic()):
            if reason := self._reason():
                raise TransferError(reason)

    def _all_came(self, words: list[str], left_s: float) -> bool:
        """Wait for a moment. Raises torch's DistStoreError once nothing of the time is left."""
        try:
            self._store.wait(words, timedelta(seconds=max(min(left_s, _LOOK_S), 0.001)))
        except dist.DistStoreError:
            if left_s <= _LOOK_S:
                raise
            return False
        return True

    def _wait(self, start: Callable[[], list[Any]]) -> None:
        if failure := self._failure(start):
            raise TransferError(self._reason() or failure)

    def _failure(self, start: Callable[[], list[Any]]) -> str:
        """Say why not all works were completed; "" if they were.

        The works must not outlive this call, as they would in the frames of an exception: they hold connections open.
        """
        try:
            works = start()
            if self._device.type != "cpu":
                return self._poll(works)
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            return str(error)
        return ""

    def _poll(self, works: list[Any]) -> str:
        """Waiting on NCCL's works would only make a stream wait, and its watchdog ends the process."""
        begun = looked = time.monotonic()
        for work in works:
            while not work.is_completed():
                now = time.monotonic()
                if now - begun > self._timeout.total_seconds():
                    return f"nothing moved for {now - begun:.0f} s"
                if now - looked > _LOOK_S:
                    looked = now
                    if reason := self._reason():
                        return reason
                time.sleep(_POLL_S)
        return ""

    def _reason(self) -> str:
        try:
            if self._store.check(["failed"]):
                return self._store.get("failed").decode(errors="replace")
            if lost := self._lost():
                self._store.set("failed", lost)
            return lost
        except RuntimeError:
            return "the trainer's store is gone"


def receive(
    channel: Channel, catalogue: Catalogue, senders: int, experts: Experts, device: torch.device
) -> Iterator[Named]:
    """Receive everything that a receiver with `experts` needs.

    Args:
        channel: this receiver's end of the session.
        catalogue: what the session sends.
        senders: how many ranks send.
        experts: those that this receiver holds; the same as the channel was opened with.
        device: of the tensors.

    Yields:
        Tensors and stacks as they come, layer by layer.

    Raises:
        TransferError: the session failed.
    """
    for layer in catalogue:
        incoming = [(sender, message) for sender in range(senders) for message in outgoing(layer, sender, experts)]
        data = [(message, buffer(message, device)) for _, message in incoming]
        channel.receive((sender, room) for (sender, _), (_, room) in zip(incoming, data, strict=True))
        found = unpack(data)
        del data  # of experts that were joined, nobody needs it any more
        yield from found


def _group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """A process group beside torch's default one, whose members are fixed."""
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # its watchdog ends the process: ours must come first
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)  # or every pair of ranks would make a communicator of its own
    return group


@contextlib.contextmanager
def _waiting_for(what: str) -> Iterator[None]:
    """Turns torch's errors in the body into a TransferError that says what was waited for."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"waiting for {what}: {error}") from error
