"""Changes to verifiers' docker, podman and apptainer runtimes.

- A worker marks its containers, so that a later worker can remove what a killed one has left. docker and podman have
  labels; apptainer only has instance names.
- Command lines hold no secrets, because all users of the node can read them. docker and podman get only the names of
  variables, apptainer gets a file that only this user can read. If a task puts a secret into another variable
  (`KEY = "${TOKEN}"`), a shell in the container does that.
- apptainer keeps names and logs of instances in the home directory, and never deletes the logs. Here both are in the
  run directory, and an instance's logs are removed with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.docker import DockerRuntime, PodmanRuntime
from verifiers.v1.utils.scope import run_scope

from primeslurm.orchestrator.environments.sandbox import uv_scripts
from primeslurm.orchestrator.environments.sandbox.apptainer import (
    PRIVATE_NETWORK,
    FixedSizeDisk,
    LimitProbe,
    PrivateNetwork,
)
from primeslurm.recipe.sections.sandboxes import Limits

log = logging.getLogger(__name__)

# verifiers' own label, with the run's id (`VF_RUN_ID`).
RUN_LABEL = "verifiers.run"
WORKER_LABEL = "primeslurm.worker"
# Timeout of a command of a container engine.
COMMAND_TIMEOUT_S = 60.0
# Environment variable: the directory that apptainer uses instead of `~/.apptainer`.
CONFIG = "APPTAINER_CONFIGDIR"
_NO_LIMITS = Limits()
# Variables of this process whose values appear in no command line; see `hide_secrets`.
_secret_names: set[str] = set()
# The user's files with registry logins, by their names in apptainer's directory; see `use_directory`.
_logins: dict[str, Path] = {}


class _ScriptRuntime:
    """Mixin of containers that may see the node's Python environments."""

    shown: ClassVar[tuple[Path, ...]] = ()

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        if self.shown:
            return await uv_scripts.upload(self, script, activate)
        words: list[str] = await super().prepare_uv_script(script, env, activate=activate)  # type: ignore[misc]
        return words


class _MarkedDocker(_ScriptRuntime, DockerRuntime):  # type: ignore[misc]
    worker: ClassVar[str]
    _label_args: list[str]
    env: dict[str, str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._label_args = [*self._label_args, "--label", f"{WORKER_LABEL}={self.worker}"]
        # verifiers puts these arguments into `docker run`, which makes them the place for volumes, too.
        self._label_args += [word for path in self.shown for word in ("--volume", f"{path}:{path}:ro")]

    async def start(self) -> None:
        # `docker run` would show the task's variables. Each command gets them, and the container itself needs none.
        variables, self.env = self.env, {}
        try:
            await super().start()
        finally:
            self.env = variables

    def _exec(self, env: dict[str, str], *, stdin: bool = False) -> list[str]:
        derived = _derived_from_secrets(env)
        secrets = {name: os.environ[name] for value in derived.values() for name in value.secrets}
        passed = {name: value for name, value in env.items() if name not in derived} | secrets
        # `--env NAME` takes the value from docker's own environment, which is the worker's.
        by_name = {f"{name}={value}": name for name, value in _same_in_worker(passed).items()}
        words = [by_name.get(word, word) for word in super()._exec(passed, stdin=stdin)]
        return [*words, *_derive_in_shell(derived, secrets, env)] if derived else words


class _MarkedPodman(_MarkedDocker, PodmanRuntime):  # type: ignore[misc]
    """verifiers' podman runtime is its docker runtime with another command."""


class _MarkedApptainer(_ScriptRuntime, FixedSizeDisk):
    worker: ClassVar[str]
    probe: ClassVar[LimitProbe]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._instance = _instance_prefix(self.worker) + self._instance.removeprefix("vf-")

    async def start(self) -> None:
        _link_logins()
        if self.config.cpu is not None or self.config.memory is not None:
            self._drop_limits(await self.probe.problem(await self._image()))
        await super().start()

    def _drop_limits(self, problem: str) -> None:
        """Drop a task's limits if apptainer cannot set them here. Raises SandboxError if the recipe sets them."""
        if not problem:
            return
        for name in ("cpus", "memory_gb"):
            if getattr(self.limits, name) is not None:
                raise SandboxError(f"apptainer cannot enforce runtime.limits.{name} here: leave it out. {problem}")
        self.config = self.config.model_copy(update={"cpu": None, "memory": None})

    def cleanup(self) -> None:
        super().cleanup()
        _remove_logs(self._instance)

    def _exec(self, env: dict[str, str], *, stdin: bool = False) -> list[str]:
        in_file = _same_in_worker(env) | {name: env[name] for name in _derived_from_secrets(env)}
        words: list[str] = super()._exec({name: env[name] for name in env if name not in in_file}, stdin=stdin)
        return [*words[:2], "--env-file", str(self._env_file(in_file)), *words[2:]] if in_file else words

    def _env_file(self, variables: Mapping[str, str]) -> Path:
        """Write variables to a file that lasts as long as the instance. Equal variables share a file."""
        assert self._dir is not None
        # os.fsencode, because values may hold bytes that are not text.
        content = os.fsencode("".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items()))
        path = self._dir / f"{hashlib.sha256(content).hexdigest()}.env"
        if not path.exists():
            path.touch(0o600)
            path.write_bytes(content)
        return path


def _same_in_worker(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if os.environ.get(name) == value}


class _Derived(NamedTuple):
    """A value that contains secrets."""

    secrets: tuple[str, ...]  # Names of the worker's variables in it
    shell_word: str  # Shell syntax that yields the value in a shell that has these variables


def _derived_from_secrets(env: Mapping[str, str]) -> dict[str, _Derived]:
    """Return the variables whose values contain secrets, except those that are equal in the worker.

    Raise SandboxError if one has a name that a shell cannot export.
    """
    secrets = {os.environ[name]: name for name in sorted(_secret_names) if os.environ.get(name)}
    if not secrets:
        return {}
    # Longest first: a secret may be part of another one.
    any_secret = re.compile(f"({'|'.join(map(re.escape, sorted(secrets, key=len, reverse=True)))})")
    same, derived = _same_in_worker(env), {}
    for name, value in env.items():
        parts = any_secret.split(value)
        if name in same or len(parts) == 1:
            continue
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise SandboxError(f"a task's env gives a secret to {name!r}, which is not a valid name of a variable")
        names = tuple(secrets[part] for part in parts[1::2])
        word = "".join(f'"${secrets[part]}"' if part in secrets else shlex.quote(part) for part in parts if part)
        derived[name] = _Derived(names, word)
    return derived


def _derive_in_shell(derived: Mapping[str, _Derived], secrets: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """Return a shell command that sets `derived`, restores what `secrets` hid in `env`, and runs the words after it."""
    restored = {
        name: shlex.quote(env[name])
        for name in secrets
        if env.get(name, secrets[name]) != secrets[name] and name not in derived
    }
    words = {name: value.shell_word for name, value in derived.items()} | restored
    # One export command: the shell expands all words before it sets a variable, so every word sees the secrets.
    exports = " ".join(f"{name}={word}" for name, word in words.items())
    unset = "".join(f"unset {name}; " for name in secrets if name not in env)
    return ["sh", "-c", f'export {exports}; {unset}exec "$@"', "sh"]


def hide_secrets(names: Iterable[str]) -> None:
    """Keep the values of these variables of this process out of command lines, even as part of other values."""
    _secret_names.update(names)


def use_directory(directory: Path) -> None:
    """Make apptainer use a directory of the run instead of the home directory. Registry logins keep working."""
    configured = os.environ.get(CONFIG)
    home = Path(configured) if configured else Path.home() / ".apptainer"
    docker = home if configured else Path.home() / ".docker"  # where apptainer looks for docker's logins
    _logins.update({name: home / name for name in ("docker-config.json", "remote.yaml")})
    _logins["config.json"] = docker / "config.json"
    os.environ |= {"APPTAINER_CACHEDIR": str(directory / "cache"), CONFIG: str(directory / "config")}


def _link_logins() -> None:
    if config := os.environ.get(CONFIG):
        Path(config).mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, path in _logins.items():
            with contextlib.suppress(FileExistsError):  # another worker was first
                if path.is_file():
                    Path(config, name).symlink_to(path)


def _remove_logs(prefix: str) -> None:
    if config := os.environ.get(CONFIG):
        for path in Path(config).glob(f"instances/logs/*/*/{prefix}*"):
            path.unlink(missing_ok=True)


def patch_runtimes(worker: str, shown: Sequence[Path] = (), limits: Limits = _NO_LIMITS) -> None:
    """Replace verifiers' container runtimes in this process.

    Args:
        worker: the worker's name within the run, with which containers are marked.
        shown: directories of the node that containers see read-only. If there are any, scripts use their packages.
        limits: the recipe's limits of apptainer. With `network: none`, containers reach only their rollout's endpoints.
    """
    attributes: dict[str, Any] = {"worker": worker, "shown": tuple(shown)}
    runtimes.DockerRuntime = type("Docker", (_MarkedDocker,), attributes)
    runtimes.PodmanRuntime = type("Podman", (_MarkedPodman,), attributes)
    bases: tuple[type, ...] = (_MarkedApptainer,)
    if limits.network == "none":
        bases = (PrivateNetwork, _MarkedApptainer)
        os.environ |= PRIVATE_NETWORK
    runtimes.ApptainerRuntime = type("Apptainer", bases, attributes | {"limits": limits, "probe": LimitProbe()})
    if shown:  # apptainer adds this variable to the `--bind` options of its command line
        binds = [*filter(None, [os.environ.get("APPTAINER_BIND")]), *(f"{path}:{path}:ro" for path in shown)]
        os.environ["APPTAINER_BIND"] = ",".join(binds)


def remove_stale(kinds: Iterable[str], worker: str) -> None:
    """Remove this run's containers on this node that an earlier worker of the same name has left."""
    for kind in kinds:
        try:
            if kind in ("docker", "podman"):
                _remove_labelled(kind, worker)
            elif kind == "apptainer":
                # check=False, because it fails if no such instance exists.
                subprocess.run(
                    [kind, "instance", "stop", "--force", f"{_instance_prefix(worker)}*"],
                    capture_output=True,
                    timeout=COMMAND_TIMEOUT_S,
                    check=False,
                )
                _remove_logs(_instance_prefix(worker))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("cannot look for containers of an earlier worker: %s", error)


def _remove_labelled(engine: str, worker: str) -> None:
    labels = (f"{RUN_LABEL}={run_scope()}", f"{WORKER_LABEL}={worker}")
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    containers = _output([engine, "ps", "--all", "--quiet", *filters]).split()
    if containers:
        _output([engine, "rm", "--force", *containers])
        log.info("removed %d %s containers of an earlier worker", len(containers), engine)


def _output(argv: list[str]) -> str:
    return subprocess.run(
        argv, capture_output=True, encoding="utf-8", errors="replace", timeout=COMMAND_TIMEOUT_S, check=True
    ).stdout


def _instance_prefix(worker: str) -> str:
    # With the run's id, because all runs of a user on a node share one list of instances.
    return f"vf-{hashlib.sha256(f'{run_scope()} {worker}'.encode()).hexdigest()[:16]}-"
