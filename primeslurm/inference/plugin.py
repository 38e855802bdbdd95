"""What vLLM loads at start (entry point `vllm.general_plugins`) in its API server, engine core and workers."""

from __future__ import annotations

import sys

from primeslurm.base import compiled_code
from primeslurm.wire.transport import secret

TRANSFER_ENGINES = {
    "primeslurm_filesystem": ("primeslurm.inference.weight_transfer.filesystem", "FilesystemTransferEngine"),
    "primeslurm_collective": ("primeslurm.inference.weight_transfer.collective", "CollectiveTransferEngine"),
}
"""Weight-transfer backends of ours: name for `--weight-transfer-config` to module and class, imported when used."""

_registered = False


def register() -> None:
    """Register our transfer engines, fixes of selection biases and pauses, gated stores and sockets, `cpu.patches`.

    The run's secret is read first, and where compiled code is kept is set, as the engine starts its processes after
    this.

    Calling it again changes nothing.

    Raises:
        RuntimeError: vLLM is not the version that a fix was written for.
    """
    global _registered
    if _registered:
        return
    secret.take()
    compiled_code.use()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from primeslurm.inference import gated_sockets, gated_store, nixl_pause_patch, spawned
    from primeslurm.inference.weight_transfer import layerwise

    if current_platform.is_cpu():
        from primeslurm.testbed.cpu_engine import patches

        patches.apply()
    layerwise.load_selection_bias()
    nixl_pause_patch.use()
    if secret.is_there():  # or it is an engine of no run, to which others of its kind connect
        gated_store.use()
        gated_sockets.use()
        spawned.use(sys.argv)
    for name, (module, class_name) in TRANSFER_ENGINES.items():
        WeightTransferEngineFactory.register_engine(name, module, class_name)
    _registered = True
