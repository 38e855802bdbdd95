"""An engine that is sent a policy by the trainer's ranks: the receiving end of `wire.stream`."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.utils.nccl import unpinned_nccl_env

from primeslurm.inference.experts import held_experts
from primeslurm.inference.weights import LayerwiseTransferEngine, PolicyError
from primeslurm.wire.link import Session
from primeslurm.wire.stream import Channel, Store, StreamError, receive


@dataclass
class StreamInit(WeightTransferInitInfo):
    """Everything comes with the update: each is a session of its own."""


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):
    """A session with the trainer, and the place of this engine's workers in it."""

    version: int
    store: str
    """host:port of the trainer's store."""
    session: str
    senders: int
    size: int
    first_rank: int
    """Rank of the engine's first worker."""
    timeout_s: float


class StreamTransferEngine(LayerwiseTransferEngine):
    """Loads tensors as they arrive; of the experts, only the worker's own are sent to it."""

    init_info_cls = StreamInit
    update_info_cls = StreamUpdate

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        """Nothing to set up."""

    def receive_weights(self, update_info: StreamUpdate) -> None:
        """Take part in the session.

        Raises:
            PolicyError: the session failed; a part of the policy may have been loaded.
        """
        session = Session(update_info.session, update_info.senders, update_info.size)
        rank = update_info.first_rank + self.parallel_config.rank
        try:
            store = Store(update_info.store, update_info.timeout_s)
            with unpinned_nccl_env():  # the trainer has none of the settings that vLLM makes for its own groups
                held = held_experts(self.model, self.parallel_config.enable_eplb)
                channel = Channel(session, rank, store, self.device, update_info.timeout_s, held.wanted)
        except StreamError as error:
            raise PolicyError(f"v{update_info.version}: {error}") from error
        try:
            received = receive(channel, store.catalogue(), session.senders, held.wanted, self.device)
            self.load(pair for item in received for pair in held.loadable(item))
        except BaseException as error:
            channel.fail(f"rank {rank}: {error}")
            if isinstance(error, StreamError):
                raise PolicyError(f"v{update_info.version}: {error}") from error
            raise
        channel.close()
