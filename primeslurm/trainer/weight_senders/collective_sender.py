"""Weight updates over NCCL: trainer ranks send the policy to the engines that need it.

Training waits only for a copy of a small policy, which a thread sends beside the next step.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from primeslurm.base.durable import retry_until_written
from primeslurm.records.events.training import WeightsPublished
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weight_senders.background import ALIGNMENT, Background, PolicyCopy, Tensors
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding, parts
from primeslurm.wire.link.trainer_link import LinkError, TrainerLink
from primeslurm.wire.weight_transfer.catalogue import (
    Catalogue,
    Experts,
    Message,
    Named,
    TensorInfo,
    outgoing,
    pack,
    stacked,
)
from primeslurm.wire.weight_transfer.collective import Channel, Group, Store, TransferError
from primeslurm.wire.weight_transfer.messages import TransferSession

log = logging.getLogger(__name__)


# Maximum size of a rank's copy of the policy, which takes memory of its GPU [bytes]
COPY_BYTES = 2 * 2**30


class Sender:
    """Sends policies to the engines over NCCL. All methods are collectives of the trainer ranks.

    `timeout_s` limits each wait within a session, and the time during which new sessions start.
    """

    def __init__(
        self, policy: PolicyModel, encoding: Encoding, link: TrainerLink, world: World, timeout_s: float
    ) -> None:
        self._policy = policy
        self._encoding = encoding
        self._link = link
        self._world = world
        self._timeout_s = timeout_s
        self.seconds = 0.0
        """Duration of the last successful session."""
        self.connect_seconds = 0.0
        """Part of `seconds` until all members had arrived and were connected."""
        self.groups = 0
        """Number of process groups made so far. A group is kept until members come or go, or a transfer fails."""
        self._kept: Group | None = None
        self._store: Store | None = None
        self._copy: PolicyCopy | None = None
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None

    def send(self, version: int, layers: Callable[[], Iterable[Tensors]] | None = None) -> int:
        """Send `version` to every engine that waits for it. Return the number of successful sessions.

        `layers`: a copy of the policy, which a thread may send. None: the policy itself. Raises RankError if the
        orchestrator does not answer.
        """
        # A failed session is not repeated here: engines that still need the policy ask for another session.
        deadline = time.monotonic() + self._timeout_s
        done, succeeded = "", 0
        with torch.cuda.stream(self._stream if layers else None):
            while (session := self._next(version, done, deadline)) is not None:
                succeeded += self._send_in(session, version, layers or self._layers)
                done = session.id
        return succeeded

    def copy(self) -> Callable[[], Iterable[Tensors]] | None:
        """Copy the policy, and return the layers to send. They are valid until the next call. None: it is too large."""
        # Kernels of two NCCL communicators that run at once on several ranks may wait for each other forever.
        if self._world.device.type == "cuda" and self._world.size > 1:
            return None
        sizes = Counter[int]()
        for info in itertools.chain.from_iterable(self._catalogue):
            sizes[info.sender] += info.bytes + ALIGNMENT
        if max(sizes.values()) > COPY_BYTES:
            return None
        if self._copy is None:
            self._copy = PolicyCopy(sizes[self._world.rank], self._world.device)
        self._copy.take(self._layers())
        return self._copy.read

    def _next(self, version: int, done: str, deadline: float) -> TransferSession | None:
        session, failure = None, None
        if self._world.is_main:
            try:
                session = self._link.offer_transfer(version, self._world.store, self._world.size, done, deadline)
            except LinkError as error:
                failure = error
        self._world.agree(failure, f"sending v{version}")
        return self._world.share(session)

    def _send_in(self, session: TransferSession, version: int, layers: Callable[[], Iterable[Tensors]]) -> bool:
        if self._store is None:
            self._store = Store(self._world.store, self._timeout_s)
            catalogue = self._catalogue  # on every rank: its first use is a collective
            if self._world.is_main:
                self._store.put_catalogue(catalogue)
        start = time.monotonic()
        channel, failure = None, None
        kept, self._kept = self._kept, None  # only a complete transfer gives it back
        try:
            channel = Channel(
                session,
                self._world.rank,
                self._store,
                self._world.device,
                self._timeout_s,
                lost=lambda: self._link.lost_from(session.id, self._world.rank),
                kept=kept,
            )
        except TransferError as error:
            failure = error
        if not self._all_succeeded(version, failure):
            if channel is not None:
                channel.fail("a trainer rank could not connect")
            return False
        assert channel is not None
        connecting = time.monotonic() - start
        self.groups += channel.made_group
        outbox = _Outbox(channel, self._catalogue, self._world.rank, self._world.device)
        for number, tensors in enumerate(layers()):
            outbox.put(number, tensors)
        outbox.finish()
        succeeded = self._all_succeeded(version, outbox.failure)
        if not succeeded:
            if outbox.failure is None:
                channel.close().abort()  # another rank failed
            return False
        self._kept = channel.close()
        self.seconds, self.connect_seconds = time.monotonic() - start, connecting
        if self._world.is_main:
            workers, took = session.size - session.senders, (self.seconds, connecting)
            log.info("sent policy v%d to %d workers in %.2f s, of which %.2f s to connect", version, workers, *took)
        return True

    def _layers(self) -> Iterator[Tensors]:
        """Gather the policy with the other ranks, and yield the tensors that this rank sends, encoded, by layer."""
        for layer in parts(self._policy, self._encoding.gathered, self._world):
            wholes = ((part, part.whole()) for part in layer)
            exported = ((part.name, whole) for part, whole in wholes if part.is_exporter)
            yield {sent.name: sent.tensor for sent in self._encoded(exported)}

    @functools.cached_property
    def _catalogue(self) -> Catalogue:
        """The tensors that all ranks send, by layer. The first use is a collective, but gathers no tensor."""
        local_layers = []
        for layer in parts(self._policy, self._encoding.gathered, self._world):
            shapes = [(part.name, part.sharded.shape, part.sharded.dtype) for part in layer if part.is_exporter]
            placeholders = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape, dtype in shapes)
            local_layers.append([self._info(sent) for sent in self._encoded(placeholders)])
        ranks = self._world.collect(local_layers)
        return [[info for layer in layers for info in layer] for layers in zip(*ranks, strict=True)]

    def _encoded(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Named]:
        for name, tensor, experts in stacked(tensors):
            for encoded_name, encoded in self._encoding.encode(name, tensor, experts).items():
                yield Named(encoded_name, encoded, experts)

    def _info(self, sent: Named) -> TensorInfo:
        dtype = str(sent.tensor.dtype).removeprefix("torch.")
        return TensorInfo(sent.name, dtype, tuple(sent.tensor.shape), self._world.rank, sent.experts)

    def _all_succeeded(self, version: int, failure: TransferError | None) -> bool:
        failed = [text for text in self._world.collect(str(failure) if failure else "") if text]
        if failed and self._world.is_main:
            log.warning("policy v%d did not reach every engine: %s", version, "; ".join(sorted(set(failed))))
        return not failed


class _Outbox:
    """Sends one rank's messages of one weight update to engines. It sends nothing more after a failure."""

    def __init__(self, channel: Channel, catalogue: Catalogue, rank: int, device: torch.device) -> None:
        self.failure: TransferError | None = None
        self._channel = channel
        self._catalogue = catalogue
        self._rank = rank
        self._device = device
        self._experts: list[tuple[int, Experts]] = [(r, channel.experts(r)) for r in channel.receivers]

    def put(self, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        """Start to send this rank's tensors of a layer to every receiver that needs them."""
        if self.failure is not None:
            return
        packed: dict[Message, torch.Tensor] = {}  # receivers that need the same tensors share the packed buffer
        messages = []
        for receiver, experts in self._experts:
            for message in outgoing(self._catalogue[layer], self._rank, experts):
                if message not in packed:
                    packed[message] = pack(message, tensors, self._device)
                messages.append((receiver, packed[message]))
        self._attempt(lambda: self._channel.send(messages))

    def finish(self) -> None:
        """Wait until all messages of this update are sent."""
        if self.failure is None:
            self._attempt(self._channel.finish)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except TransferError as error:
            self.failure = error
            self._channel.fail(f"rank {self._rank}: {error}")


@dataclass
class CollectiveTransfer:
    """Sends every version to the engines directly. Publishes only the last one, as the result of the run."""

    sender: Sender
    publisher: Publisher
    last: int
    model: str
    link: TrainerLink  # used by no one else but the sender, because a thread announces versions
    world: World

    def __post_init__(self) -> None:
        self._background = Background()

    def resume(self, version: int) -> None:
        self.publisher.discard_after(version)
        self._announce(version, "" if version else self.model)
        self._publish_last(version)

    def transfer(self, version: int, published: Callable[[WeightsPublished], None]) -> None:
        self.finish()
        layers = self.sender.copy() if version != self.last else None
        began = time.monotonic()

        def complete() -> None:
            self._announce(version, "")
            self.sender.send(version, layers)
            sent_s, connect_s = round(self.sender.seconds, 3), round(self.sender.connect_seconds, 3)
            beside_s = round(time.monotonic() - began, 3) if layers else None
            published(WeightsPublished(version, sent_s, connect_s, self.sender.groups, beside_s=beside_s))

        if layers is not None:
            self._background.start(complete)
        else:
            complete()
            self._publish_last(version)

    def pending(self) -> Future[None] | None:
        return self._background.pending()

    def finish(self) -> None:
        self._background.finish()

    def repeat(self, version: int) -> None:
        self.finish()
        self.sender.send(version)

    def flush(self, version: int) -> None:
        self.publisher.flush(version)

    def _announce(self, version: int, path: str) -> None:
        if self.world.is_main:
            retry_until_written(lambda: self.link.announce(version, path))

    def _publish_last(self, version: int) -> None:
        if version == self.last:
            self.publisher.publish(version)
