"""What sandboxes of providers need where workers run: a client, a key, and a way back to the model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.prime import load_prime_config

from primeslurm.base.errors import Violation
from primeslurm.recipe.sandbox_rules import PROVIDER_KEYS

_FIELD = "environments.runtime"


@dataclass(frozen=True)
class Provider:
    """How a provider is asked."""

    module: str
    """The Python package of its client."""
    install: str
    file: str | None = None
    """Below the home directory: where it looks for keys that are not set."""


PROVIDERS: Mapping[str, Provider] = {
    "prime": Provider("prime_sandboxes", "prime-sandboxes"),
    "modal": Provider("modal", "'verifiers[modal]'", ".modal.toml"),
    "e2b": Provider("e2b", "'verifiers[e2b]'"),
}


def unmet(kind: str, env: vf.Env) -> Iterator[Violation]:
    """Find what a hosted runtime needs and this machine has not.

    Args:
        kind: one of `PROVIDERS`.
        env: of the environment whose programs run there.
    """
    provider = PROVIDERS[kind]
    if importlib.util.find_spec(provider.module) is None:
        why = f"the Python package `{provider.module}` is not installed here"
        yield Violation(_FIELD, kind, why, f"`pip install {provider.install}` where jobs run, or another runtime")
    for name in _lacking(kind):
        yield Violation(
            _FIELD, kind, f"jobs do not get {name}", f"export it where you submit, and `pass_env: [{name}]`"
        )
    tunnel = _tunnel(env)
    if tunnel == "prime" and kind != "prime":
        for name in _lacking(tunnel):
            why = f"its programs reach the model through a tunnel of Prime Intellect, and jobs do not get {name}"
            fix = f"`pass_env: [{name}]`, or `interception: {{type: server, tunnel: {{type: custom, ...}}}}`"
            yield Violation("environments.args.env.interception", tunnel, why, fix)


def _lacking(kind: str) -> list[str]:
    """The variables with a provider's keys that are not set, unless its client finds them in a file."""
    file = PROVIDERS[kind].file
    if (kind == "prime" and load_prime_config().get("api_key")) or (file and (Path.home() / file).is_file()):
        return []
    return [name for name in PROVIDER_KEYS[kind] if not os.environ.get(name)]


def _tunnel(env: vf.Env) -> str:
    tunnel: Any = getattr(env.config.interception, "tunnel", None)  # pools of servers have prime's
    return "prime" if tunnel is None else str(tunnel.type)
