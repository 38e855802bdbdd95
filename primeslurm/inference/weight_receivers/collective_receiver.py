"""Weight updates over NCCL: trainer ranks send tensors to the engine workers, one session per update."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.utils.nccl import unpinned_nccl_env

from primeslurm.inference.weight_receivers.experts import held_experts
from primeslurm.inference.weight_receivers.layerwise import LayerwiseTransferEngine, PolicyError
from primeslurm.wire.weight_transfer.collective import Channel, Group, Store, TransferError, receive
from primeslurm.wire.weight_transfer.messages import SessionPlace, TransferSession


@dataclass
class CollectiveInit(WeightTransferInitInfo):
    """vLLM's set-up message of this backend. Empty, because the first update connects."""


class CollectiveTransferEngine(LayerwiseTransferEngine):
    """vLLM weight-transfer backend that loads tensors as they arrive over NCCL. A worker gets only its own experts."""

    init_info_cls = CollectiveInit
    update_info_cls = SessionPlace
    _kept: Group | None = None

    def init_transfer_engine(self, init_info: CollectiveInit) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: SessionPlace) -> None:
        """Receive and load a policy. Raise PolicyError if the session fails; some tensors may have been loaded then."""
        session = TransferSession(update_info.session, update_info.senders, update_info.size)
        rank = update_info.first_rank + self.parallel_config.rank
        kept, self._kept = self._kept, None  # only a complete transfer gives it back
        try:
            store = Store(update_info.store, update_info.timeout_s)
            with unpinned_nccl_env():  # vLLM's NCCL settings for its own groups would not match the trainer's
                held = held_experts(self.model, self.parallel_config.enable_eplb)
                channel = Channel(session, rank, store, self.device, update_info.timeout_s, held.wanted, kept=kept)
        except TransferError as error:
            raise PolicyError(f"v{update_info.version}: {error}") from error
        try:
            received = receive(channel, store.catalogue(), session.senders, held.wanted, self.device)
            self.load(pair for item in received for pair in held.loadable(item))
        except BaseException as error:
            channel.fail(f"rank {rank}: {error}")
            if isinstance(error, TransferError):
                raise PolicyError(f"v{update_info.version}: {error}") from error
            raise
        self._kept = channel.close()

    def shutdown(self) -> None:
        """Abort the process group that was kept for the next update."""
        self._kept = None
