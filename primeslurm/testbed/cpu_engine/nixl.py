"""NIXL on CPU: its progress thread waits for events instead of asking for them without a pause.

NIXL's Python face gives the thread a delay of 0, with which it takes a whole core of an idle engine. A GPU's host has
cores to spare; on a small machine two such engines leave nothing to those that compute.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from primeslurm.inference.guards import changed, expect

PAUSE_US = 1000
"""Longest wait for an event (microseconds), after which the thread looks at every connection all the same."""


def apply() -> None:
    """Have the agents that vLLM makes from now on wait."""
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
    """Set the delay in what NIXL's Python face, the module `api`, hands to NIXL."""
    bindings = api.nixlBind
    create = bindings.nixlAgent
    if not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        raise changed("nixlAgentConfig has no pthrDelay any more")

    def create_pausing(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_US
        return create(name, config)

    bindings.nixlAgent = create_pausing
