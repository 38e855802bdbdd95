"""What every planned command line is made of: argv, environment, ports, and what its agent lays out for it. Pure.

Host names and ports stay placeholders (see `plan.model`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from primeslurm.plan.model import NodeRole

EngineRole = Literal["engine", "prefill", "decode"]
Device = Literal["cuda", "cpu"]

ENGINE_ROLES: dict[NodeRole, EngineRole] = {"inference": "engine", "prefill": "prefill", "decode": "decode"}
"""What engines do on the nodes of a role."""
RENDEZVOUS_PORT = "master"
"""Name of the port at which the trainer's ranks meet."""
GIN_OFF = "EP_DISABLE_GIN"
"""DeepEP's variable for ranks that reach each other by NVLink alone."""
COMPILED_CODE = {"PRIMESLURM_COMPILED_CODE": "/tmp"}
"""Where trainers and engines keep what is compiled while they run, on each node's own disk: below it, they make a
directory for each user and version. See `primeslurm.base.compiled_code`."""


class Command(NamedTuple):
    """How to start a process, and what it needs."""

    argv: tuple[str, ...]
    env: dict[str, str]
    ports: tuple[str, ...]
    """Names of the ports it listens on."""
    files: dict[str, str] = {}
    """Files written for it before it starts: name under `${tmp}` to text."""
    scratch: tuple[str, ...] = ()
    """Directories on the node's own disk that exist while the attempt runs."""
    imports: tuple[str, ...] = ()
    """Modules that it imports, as others of its kind do."""


@dataclass(frozen=True)
class ReplicaEngines:
    """Names of the engines of one replica: either engines that do both, or prefill and decode engines.

    Raises:
        ValueError: neither shape, or both.
    """

    engines: Sequence[str] = ()
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()

    def __post_init__(self) -> None:
        if bool(self.engines) == bool(self.prefill) or bool(self.prefill) != bool(self.decode):
            raise ValueError("a replica has either engines, or prefill and decode engines")

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode are apart."""
        return bool(self.prefill)

    @property
    def all(self) -> tuple[str, ...]:
        """All of them, prefill first."""
        return (*self.engines, *self.prefill, *self.decode)


def long_options(options: Mapping[str, object]) -> list[str]:
    """Turn `{"max_len": 5, "fast": True, "slow": False, "x": {...}}` into --max-len 5 --fast --no-slow --x JSON."""
    argv: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            argv += [f"--{name}", json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            argv += [f"--{name}", *map(str, value)]
        else:
            argv += [f"--{name}", str(value)]
    return argv


def url_of(process: str) -> str:
    """Write the URL at which a process serves HTTP, with a placeholder."""
    return f"http://${{addr:{process}:http}}"
