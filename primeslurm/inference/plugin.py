"""vLLM plugin that registers the weight-transfer backends and patches vLLM.

vLLM loads it through the entry point `vllm.general_plugins` in its API server, engine core and workers.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from primeslurm.base import compiled_code
from primeslurm.wire.names import ADAPTER_BACKEND, ADAPTERS, KV_EVENTS_HIDE_SALT, KV_EVENTS_READER
from primeslurm.wire.transport import secret

# Weight-transfer backends: name in `--weight-transfer-config`, module and class. Imported when used.
TRANSFER_ENGINES = {
    "primeslurm_filesystem": ("primeslurm.inference.weight_receivers.filesystem_receiver", "FilesystemTransferEngine"),
    "primeslurm_collective": ("primeslurm.inference.weight_receivers.collective_receiver", "CollectiveTransferEngine"),
    ADAPTER_BACKEND: ("primeslurm.inference.weight_receivers.adapter_receiver", "AdapterTransferEngine"),
}

_registered = False


def register() -> None:
    """Register the weight-transfer backends and patch vLLM. Further calls have no effect.

    Raise RuntimeError if vLLM's code is not as a patch expects it.
    """
    global _registered
    if _registered:
        return
    # First, because the engine's child processes inherit the secret and the cache directories.
    secret.take()
    compiled_code.use()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from primeslurm.inference import (
        authenticated_store,
        encrypted_sockets,
        kv_events,
        patches,
        prefill_version,
        routed_experts,
    )
    from primeslurm.inference.weight_receivers import layerwise

    if current_platform.is_cpu():
        # Loaded by name: engines on GPUs do not depend on the testbed.
        importlib.import_module("primeslurm.testbed.cpu_engine.patches").apply()
    layerwise.load_selection_bias()
    if "--speculative-config" in sys.argv:
        layerwise.give_draft_layers()
    patches.pause_with_kept_blocks()
    prefill_version.apply()
    if routed_experts.REPLAY_OPTION in sys.argv:
        routed_experts.apply()
    if root := os.environ.get(ADAPTERS):
        importlib.import_module("primeslurm.inference.weight_receivers.named_adapters").use(Path(root))
    elif "--enable-lora" in sys.argv:
        importlib.import_module("primeslurm.inference.weight_receivers.adapter_receiver").use()
    if reader := os.environ.get(KV_EVENTS_READER):
        kv_events.use(reader, hides_salt=KV_EVENTS_HIDE_SALT in os.environ)
    if secret.is_there():  # an engine outside a run has no secret, and its peers connect without one
        authenticated_store.use()
        encrypted_sockets.use()
        patches.load_plugins_early(sys.argv)
    patches.wait_for_late_ranks()
    patches.inspect_models_in_forks()
    for name, (module, class_name) in TRANSFER_ENGINES.items():
        WeightTransferEngineFactory.register_engine(name, module, class_name)
    _registered = True
