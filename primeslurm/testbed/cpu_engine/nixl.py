"""Makes NIXL's progress thread sleep between polls on CPU engines.

NIXL's Python API sets the delay to 0, so the thread of an idle engine uses a whole core. GPU hosts have cores to
spare. On a small machine two such engines leave no core for computation.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from primeslurm.inference.patches import changed_code_error, expect

# Delay between two polls of the progress thread [microseconds].
PAUSE_US = 1000


def apply() -> None:
    """Set the delay for all agents that vLLM creates from now on."""
    from vllm.distributed import nixl_utils

    load = expect(nixl_utils, "_load_nixl_attr", ("name",))

    @functools.wraps(load)
    def load_and_pause(name: str) -> Any:
        value = load(name)
        if name == "NixlWrapper" and value is not None:
            _pause(sys.modules[value.__module__])
        return value

    nixl_utils._load_nixl_attr = load_and_pause


def _pause(api: Any) -> None:
    """Wrap the agent constructor in NIXL's Python module `api`."""
    bindings = api.nixlBind
    create = bindings.nixlAgent
    if not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        raise changed_code_error("nixlAgentConfig has no pthrDelay")

    def create_pausing(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_US
        return create(name, config)

    bindings.nixlAgent = create_pausing
