"""An engine that is sent a policy by the trainer's ranks: the receiving end of `wire.stream`."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.utils.nccl import unpinned_nccl_env

from primeslurm.inference.weights import LayerwiseTransferEngine, PolicyError
from primeslurm.wire.link import Session
from primeslurm.wire.stream import Channel, Experts, Store, StreamError, receive


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
                experts = self._experts()
                channel = Channel(session, rank, store, self.device, update_info.timeout_s, experts)
        except StreamError as error:
            raise PolicyError(f"v{update_info.version}: {error}") from error
        try:
            self.load(receive(channel, store.catalogue(), session.senders, experts, self.device))
        except BaseException as error:
            channel.fail(f"rank {rank}: {error}")
            if isinstance(error, StreamError):
                raise PolicyError(f"v{update_info.version}: {error}") from error
            raise
        channel.close()

    def _experts(self) -> Experts:
        """The experts that this worker holds; None for all, also if they move between workers."""
        if self.parallel_config.enable_eplb:
            return None
        maps = [m.expert_map_manager.expert_map for m in self.model.modules() if isinstance(m, RoutedExperts)]
        if not maps or any(found is None for found in maps):
            return None
        held = {frozenset((found >= 0).nonzero().flatten().tolist()) for found in maps}
        return held.pop() if len(held) == 1 else None
