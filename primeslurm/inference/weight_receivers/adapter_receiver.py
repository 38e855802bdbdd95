"""Weight updates of LoRA runs: workers load a published adapter, which vLLM applies beside the unchanged base weights.

Requests name the adapter ADAPTER, whatever its version. The API server has read the files into the page cache when
workers read them (`version_gate`). Only `finish_weight_update` needs a pause, for a copy in memory.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from primeslurm.inference.patches import expect
from primeslurm.inference.weight_receivers.filesystem_receiver import FilesystemInit, policy_files
from primeslurm.inference.weight_receivers.layerwise import PolicyError, first_three
from primeslurm.wire.names import ADAPTER, ADAPTER_BACKEND
from primeslurm.wire.weight_transfer.messages import PolicyDirectory

# vLLM's number of the adapter. There is no other.
_NUMBER = 1


class AdapterTransferEngine(WeightTransferEngine):
    """vLLM weight-transfer backend that replaces the LoRA adapter. Version 0 is the model without an adapter."""

    init_info_cls = FilesystemInit
    update_info_cls = PolicyDirectory
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: FilesystemInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        self._read: LoRAModel | None = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PolicyDirectory) -> None:
        """Read an adapter into host memory. Raise PolicyError if it is incomplete or does not fit the model."""
        manager = self.model.lora_manager
        if update_info.version == 0:
            zeros = manager.create_dummy_lora(_NUMBER, manager.lora_config.max_lora_rank, self.model.embedding_modules)
            self._read = zeros
            return
        directory = Path(update_info.path)
        policy_files(directory, update_info.version)
        reader = WorkerLoRAManager(self.vllm_config, self.device, self.model.embedding_modules)
        reader._adapter_manager = manager
        try:
            self._read = reader._load_adapter(LoRARequest(ADAPTER, _NUMBER, str(directory)))
            check_layers(manager, self._read)
        except ValueError as error:
            raise PolicyError(f"{directory}: {error}") from error

    def finish_weight_update(self) -> None:
        """Make vLLM generate with the adapter that `receive_weights` has read."""
        if self._read is None:
            raise PolicyError("no adapter was read")
        manager, adapter, self._read = self.model.lora_manager, self._read, None
        manager.remove_adapter(_NUMBER)
        manager.add_adapter(adapter)
        manager.activate_adapter(_NUMBER)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Do nothing, because no resource outlives an update."""


def check_layers(manager: Any, adapter: LoRAModel) -> None:
    """Raise ValueError if the engine lacks a layer of an adapter that was read."""
    # vLLM ignores what it finds no layer for, and would sample from another policy.
    layers = {*manager.modules, *(name for names in manager.packed_modules.values() for name in names)}
    # `base_layer` stands for gate and up of stacked experts.
    if unknown := {name.removesuffix(".base_layer") for name in adapter.loras} - layers:
        raise ValueError(f"the engine has no layer for {len(unknown)} parts: {first_three(unknown)}")


def use() -> None:
    """Patch vLLM: requests can name the adapter, and it stays loaded after weight updates."""
    init = expect(OpenAIServingModels, "__init__", ("self",))
    reset = expect(LoRAModelRunnerMixin, "reset_lora_state", ("self",))

    # vLLM would give the adapter a new number each time that it looks for it, and workers know only one.
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # The path is never read, because workers find the number among their adapters.
        self.lora_requests[ADAPTER] = LoRARequest(ADAPTER, _NUMBER, ADAPTER)

    # After a weight update, vLLM drops all adapters, because it assumes that the base weights were replaced.
    @functools.wraps(reset)
    def reset_lora_state(self: Any) -> None:
        transfer = self.vllm_config.weight_transfer_config
        if transfer is None or transfer.backend != ADAPTER_BACKEND:
            reset(self)

    OpenAIServingModels.__init__ = __init__
    LoRAModelRunnerMixin.reset_lora_state = reset_lora_state
