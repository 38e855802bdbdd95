"""Which parts of the trainer's state are loaded from a checkpoint, and which begin anew."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger(__name__)
_STATE, _OPTIONS = "optimizer.state.", "optimizer.param_groups."
"""How names of an optimizer's state and options begin. A parameter's name and the name of the part follow."""


class StatePlanner(dcp.DefaultLoadPlanner):
    """Plans the load of a trainer's whole state. Optimizer state that a checkpoint lacks for a parameter becomes zero.

    Checkpoints of earlier releases lack all state of parameters that had no gradient until then. They also have the
    state of another optimizer where Muon trains other parameters now. Zeros are the state with which each optimizer
    begins. Anything else that is missing is an error.
    """

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Begin to plan, without what the checkpoint does not have to hold."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        stored = _by_parameter(metadata.state_dict_metadata, _STATE)
        lacking = {p: n for p, n in _by_parameter(self.state_dict, _STATE).items() if not n & stored[p]}
        for parameter, names in lacking.items():
            for name in names:
                self.state_dict.pop(f"{_STATE}{parameter}.{name}").zero_()
        options = _by_parameter(self.state_dict, _OPTIONS)
        for parameter in filter(stored.get, lacking):  # these keep the options of their new optimizer
            for name in options[parameter]:
                if (key := f"{_OPTIONS}{parameter}.{name}") not in metadata.state_dict_metadata:
                    del self.state_dict[key]
        if lacking and is_coordinator:
            log.info("optimizer state of %d parameters is not in the checkpoint: theirs begins at zero", len(lacking))


def _by_parameter(keys: Iterable[str], prefix: str) -> defaultdict[str, set[str]]:
    """What a parameter has under keys of `<prefix><parameter>.<name>`."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for key in keys:
        if key.startswith(prefix):
            parameter, _, name = key.removeprefix(prefix).rpartition(".")
            names[parameter].add(name)
    return names
