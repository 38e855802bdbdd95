"""Common parts of all planned commands. Host names and ports are placeholders (see `plan.model`). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from primeslurm.plan.model import NodeRole

EngineRole = Literal["engine", "prefill", "decode"]
Device = Literal["cuda", "cpu"]

# Role of the engines on the nodes of each role
ENGINE_ROLES: dict[NodeRole, EngineRole] = {"inference": "engine", "prefill": "prefill", "decode": "decode"}
# Name of the port at which the trainer's ranks meet
RENDEZVOUS_PORT = "master"
# Variable that tells DeepEP that all its ranks reach each other by NVLink
GIN_OFF = "EP_DISABLE_GIN"
# Directory on the node's disk for code that trainers and engines compile while they run. They add a directory per user
# and version (`primeslurm.base.compiled_code`).
COMPILED_CODE = {"PRIMESLURM_COMPILED_CODE": "/tmp"}


class Command(NamedTuple):
    """How to start a process."""

    argv: tuple[str, ...]
    env: dict[str, str]
    ports: tuple[str, ...]  # names of the ports that it listens on
    files: dict[str, str] = {}  # text of files written before the start, by name under `${tmp}`
    scratch: tuple[str, ...] = ()  # directories on the node's disk that exist while the attempt runs
    imports: tuple[str, ...] = ()  # modules that the process imports and others of its kind, too


@dataclass(frozen=True)
class ReplicaEngines:
    """Names of the engines of one replica: either `engines`, or `prefill` and `decode`."""

    engines: Sequence[str] = ()
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()

    def __post_init__(self) -> None:
        if bool(self.engines) == bool(self.prefill) or bool(self.prefill) != bool(self.decode):
            raise ValueError("a replica has either engines, or prefill and decode engines")

    @property
    def disaggregated(self) -> bool:
        return bool(self.prefill)

    @property
    def all(self) -> tuple[str, ...]:
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
    """Return the HTTP URL of a process, with a placeholder for its address."""
    return f"http://${{addr:{process}:http}}"
