"""Sending a policy from trainer ranks to engine workers, tensor by tensor: NCCL between GPUs, gloo between CPUs.

Each update is a session. Senders (all trainer ranks) come first, then receivers (the workers of the engines that take
part). They meet in the store of the trainer's rank 0. If all of them still hold the process group of the same earlier
session, they use it again; otherwise they make a new one, and abort what they hold. The catalogue describes all
tensors once, layer by layer, with their senders, and each receiver publishes which experts it holds. From these two,
both ends derive every message, so they negotiate nothing else:

    for each layer, for each sender: one message that all receivers get, one with the receiver's experts

A process that fails writes that to the store, aborts its group and leaves; the others then fail too, instead of
waiting. If a process was killed, a sender learns it from the orchestrator, which it asks while it waits. No wait
exceeds the session's timeout.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from primeslurm.wire.decoding import DamagedError, decode_msgpack
from primeslurm.wire.transport import rendezvous
from primeslurm.wire.weight_transfer.catalogue import Catalogue, Experts, Message, Named, buffer, outgoing, unpack
from primeslurm.wire.weight_transfer.messages import TransferSession

_PREFIX = "primeslurm/weights"
_POLL_S = 0.0005
# Longest wait for all processes to arrive. Pausing an engine takes seconds; trainer and other engines are idle.
ARRIVE_S = 120.0
# Maximum size [bytes]. A tensor needs about 100 bytes, a stack some hundreds more, and there are some ten thousand.
LARGEST_CATALOGUE = 256 << 20
_CHECK_S = 1.0  # interval at which a waiting process checks whether another one has failed


class TransferError(RuntimeError):
    """A session failed: a process did not arrive, left, or took too long."""


class Store:
    """The trainer's store, where senders and receivers exchange everything but tensors.

    Raise TransferError if the store does not answer.
    """

    def __init__(self, address: str, timeout_s: float, arrive_s: float = ARRIVE_S) -> None:
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=min(timeout_s, arrive_s))  # a trainer that was killed never answers
        try:
            local_port = rendezvous.tunnel(host, int(port), timeout.total_seconds())
            store = dist.TCPStore("127.0.0.1", local_port, is_master=False, timeout=timeout)
        except RuntimeError as error:  # includes torch's own errors
            raise TransferError(f"{address}: {error}") from error
        self.store = dist.PrefixStore(_PREFIX, store)

    def put_catalogue(self, catalogue: Catalogue) -> None:
        packed = zlib.compress(msgspec.msgpack.encode(catalogue), 1)
        self.store.set("catalogue", packed)  # type: ignore[arg-type]  # torch's stub knows str alone

    def catalogue(self) -> Catalogue:
        """Wait for the catalogue. Raise TransferError if it does not arrive in time or is damaged."""
        with _waiting_for("the catalogue"):
            packed = self.store.get("catalogue")
        return unpacked(packed)


def unpacked(packed: bytes) -> Catalogue:
    """Decode a catalogue, or raise TransferError. Its size is bounded: any process of the run can write the store."""
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(packed, LARGEST_CATALOGUE)
        if not unpacking.eof:
            raise DamagedError(f"it is cut off, or longer than {LARGEST_CATALOGUE} bytes")
        return decode_msgpack(raw, Catalogue)
    except (zlib.error, DamagedError) as error:
        raise TransferError(f"the catalogue cannot be read: {error}") from error


class Group:
    """A process group that lasts as long as its members stay the same and no transfer fails.

    The id of the session that made it names its members and their starts: only a process that took part can hold it.
    """

    def __init__(self, session: str, rank: int, size: int, process_group: Any) -> None:
        self.session = session
        self.place = rank, size
        self.process_group = process_group

    def abort(self) -> None:
        if self.process_group is not None:
            self.process_group.abort()
            # gloo closes its connections with the last reference, which the other members notice at once.
            self.process_group = None

    def __del__(self) -> None:
        self.abort()  # torch's own destructor might wait for members that are gone


class Channel:
    """One sender's or receiver's end of a session. It sends or receives messages, and notices failures.

    Args:
        lost: For senders: returns why the session is lost, or "". Called about once per second of waiting.
        kept: This process's group of an earlier session, which `close` returned. The channel reuses or aborts it.

    Raises:
        TransferError: A member did not arrive in time, or is lost.
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
        kept: Group | None = None,
    ) -> None:
        self._lost = lost
        self._timeout = timedelta(seconds=timeout_s)
        self._arrive_s = min(timeout_s, arrive_s)
        self._store = dist.PrefixStore(session.id, store.store)
        self._device = device
        self.receivers = range(session.senders, session.size)
        self.made_group = False
        self._moving: list[tuple[Any, torch.Tensor]] = []  # works of torch, and their tensors
        try:
            with _waiting_for(f"{session.size} ranks"):
                self._group = self._joined(session, rank, msgspec.msgpack.encode(experts), kept)
        except TransferError:
            if kept is not None:
                kept.abort()
            raise

    def experts(self, receiver: int) -> Experts:
        """Return the experts that a receiver holds. Raise TransferError if they cannot be read."""
        try:
            experts: Experts = decode_msgpack(self._store.get(f"experts/{receiver}"), Experts)  # type: ignore[arg-type]
        except DamagedError as error:
            raise TransferError(f"the experts of rank {receiver} cannot be read: {error}") from error
        return experts

    # Messages travel while the caller prepares the next layer, or loads the last one.
    def send(self, messages: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Wait for earlier messages, and start to send (receiver, uint8 tensor) pairs. Raise TransferError."""
        self.finish()
        self._raise_if(self._begun(messages, lambda group, receiver, data: group.send([data], receiver, 0)))

    def receive(self, messages: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Wait for earlier messages, and start to fill (sender, uint8 tensor) pairs. Raise TransferError."""
        self.finish()
        self._raise_if(self._begun(messages, lambda group, sender, data: group.recv([data], sender, 0)))

    def finish(self) -> None:
        """Wait until all messages are sent or received. Raise TransferError."""
        self._raise_if(self._finished())

    def fail(self, reason: str) -> None:
        """Leave the session and make the other members fail with `reason`."""
        try:
            self._store.set("failed", reason)
        finally:
            self._group.abort()
            self._moving = []

    def close(self) -> Group:
        """End the session after its last message. Return its group, for the next session."""
        return self._group

    def _joined(self, session: TransferSession, rank: int, experts: bytes, kept: Group | None) -> Group:
        """Wait for all members. Return the kept group if all of them hold it at the same ranks, or else a new one."""
        if kept is not None and kept.place == (rank, session.size):
            self._store.add(f"holders/{kept.session}", 1)
        self._meet("experts", rank, session.size, experts)
        # Every holder has added itself before it arrived, so all members read the same number.
        if kept is not None:
            if self._store.add(f"holders/{kept.session}", 0) == session.size:
                return kept
            kept.abort()
        # All members arrive a second time before any connects: NCCL's own rendezvous has no timeout, so every member
        # must still be alive when the last one has come.
        self._meet("present", rank, session.size, b"")
        self.made_group = True
        group = _process_group(self._store, rank, session.size, self._device, self._timeout)
        return Group(session.id, rank, session.size, group)

    def _meet(self, name: str, rank: int, size: int, message: bytes) -> None:
        """Write this rank's message under `name` in the store, and wait until all `size` ranks have written theirs."""
        self._store.set(f"{name}/{rank}", message)  # type: ignore[arg-type]  # torch's stub knows str alone
        keys = [f"{name}/{other}" for other in range(size)]
        deadline = time.monotonic() + self._arrive_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                self._store.wait(keys, timedelta(seconds=max(min(left_s, _CHECK_S), 0.001)))
                return
            except dist.DistStoreError:
                if left_s <= _CHECK_S:
                    raise
            if reason := self._reason():
                raise TransferError(reason)

    def _raise_if(self, failure: str) -> None:
        if failure:
            raise TransferError(self._reason() or failure)

    # Works and torch's group keep connections open, so no exception leaves the next two methods with their frames.
    def _begun(
        self, messages: Sequence[tuple[int, torch.Tensor]], start: Callable[[Any, int, torch.Tensor], Any]
    ) -> str:
        """Begin to send or receive tensors, by `start`. Return the text of the error; empty if there is none."""
        try:
            for rank, data in messages:
                self._moving.append((start(self._group.process_group, rank, data), data))
        except RuntimeError as error:
            return str(error)
        return ""

    def _finished(self) -> str:
        """Wait until all begun sends or receives are done. Return the text of the error; empty if there is none."""
        moving, self._moving = self._moving, []
        try:
            if self._device.type != "cpu":
                return self._poll([work for work, _ in moving])
            for work, _ in moving:
                work.wait(self._timeout)
        except RuntimeError as error:
            return str(error)
        return ""

    def _poll(self, works: list[Any]) -> str:
        # Waiting on NCCL's works only makes a stream wait, and its watchdog would end the process.
        begun = checked = time.monotonic()
        for work in works:
            while not work.is_completed():
                now = time.monotonic()
                if now - begun > self._timeout.total_seconds():
                    return f"no progress for {now - begun:.0f} s"
                if now - checked > _CHECK_S:
                    checked = now
                    if reason := self._reason():
                        return reason
                time.sleep(_POLL_S)
        return ""

    def _reason(self) -> str:
        """Return why the session failed, or "" if no member says so."""
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
    """Yield tensors and stacks of experts in order of arrival, layer by layer. Raises TransferError.

    `experts` are those that the channel was opened with.
    """
    arriving: list[tuple[Message, torch.Tensor]] = []
    for layer in catalogue:
        incoming = [(sender, message) for sender in range(senders) for message in outgoing(layer, sender, experts)]
        channel.finish()  # otherwise there would be memory for three layers
        arrived, arriving = arriving, [(message, buffer(message, device)) for _, message in incoming]
        # On GPUs it starts after all that is queued, so start it before the last layer is loaded.
        channel.receive([(sender, data) for (sender, _), (_, data) in zip(incoming, arriving, strict=True)])
        yield from _freed(arrived)
    channel.finish()
    yield from _freed(arriving)


def _freed(messages: list[tuple[Message, torch.Tensor]]) -> Iterator[Named]:
    """Unpack messages, and yield their tensors. Drop messages and tensors as early as possible to free memory."""
    tensors = unpack(messages)
    messages.clear()  # joined experts are copies, so their messages can be freed
    yield from tensors


def _process_group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # NCCL's watchdog ends the process, so our timeout must come first
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)  # otherwise every pair of ranks would create its own communicator
    return group


@contextlib.contextmanager
def _waiting_for(what: str) -> Iterator[None]:
    """Convert torch's errors in the body to a TransferError that says what (`what`) was awaited."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"waiting for {what}: {error}") from error
