"""Containers of a worker bear its mark, and no command line of theirs has the worker's own variables.

The mark is for what outlives a worker to be found again and removed, and nothing else: one that is killed removes
nothing, and a command that is ended while it starts a container may have asked for one already. docker and podman keep
labels; apptainer has names only.

Command lines are for all users of the node to see. Secrets that a recipe names are variables of the worker, and so of
what it starts: docker and podman are told names alone, apptainer is told a file of the worker's user. What a task makes
of a secret (`KEY = "${TOKEN}"`) is made of it in the container, by a shell.

apptainer keeps names and logs of its instances at home, and the logs for good. Here both are files of the run, and logs
go with their instance.
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
from primeslurm.orchestrator.environments.sandbox.apptainer import PRIVATE_NETWORK, LimitProbe, PrivateNetwork
from primeslurm.orchestrator.environments.sandbox.disk import FixedSizeDisk
from primeslurm.recipe.sections.sandboxes import Limits

log = logging.getLogger(__name__)

RUN_LABEL = "verifiers.run"
"""verifiers' own, with the run's id (`VF_RUN_ID`)."""
WORKER_LABEL = "primeslurm.worker"
COMMAND_TIMEOUT_S = 60.0
"""Longest wait for an answer of an engine."""
_hidden: set[str] = set()
"""Names of variables; see `hide`."""
CONFIG = "APPTAINER_CONFIGDIR"
"""Environment variable: what apptainer uses instead of `~/.apptainer`."""
_OPEN = Limits()
_logins: dict[str, Path] = {}
"""Files of the user, by the names that apptainer looks for in that directory; see `write_below`."""


class _Scripted:
    """A container that may see the environments of the node, where scripts then find their packages."""

    shown: ClassVar[tuple[Path, ...]] = ()

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        if self.shown:
            return await uv_scripts.put(self, script, activate)
        words: list[str] = await super().prepare_uv_script(script, env, activate=activate)  # type: ignore[misc]
        return words


class _MarkedDocker(_Scripted, DockerRuntime):  # type: ignore[misc]
    worker: ClassVar[str]
    _label_args: list[str]
    env: dict[str, str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._label_args = [*self._label_args, "--label", f"{WORKER_LABEL}={self.worker}"]
        self._label_args += [word for path in self.shown for word in ("--volume", f"{path}:{path}:ro")]

    async def start(self) -> None:
        # the container's own process needs none of the task's variables, and each command gets them
        variables, self.env = self.env, {}
        try:
            await super().start()
        finally:
            self.env = variables

    def _exec(self, env: dict[str, str], *, stdin: bool = False) -> list[str]:
        made = _made(env)
        used = {secret: os.environ[secret] for one in made.values() for secret in one.secrets}
        told = {name: value for name, value in env.items() if name not in made} | used
        named = {f"{name}={value}": name for name, value in _own(told).items()}
        words = [named.get(word, word) for word in super()._exec(told, stdin=stdin)]
        return [*words, *_making(made, used, env)] if made else words


class _MarkedPodman(_MarkedDocker, PodmanRuntime):  # type: ignore[misc]
    """verifiers' podman is its docker with another command."""


class _MarkedApptainer(_Scripted, FixedSizeDisk):
    worker: ClassVar[str]
    probe: ClassVar[LimitProbe]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._instance = _instances(self.worker) + self._instance.removeprefix("vf-")

    async def start(self) -> None:
        _link_logins()
        if self.config.cpu is not None or self.config.memory is not None:
            self._drop_limits(await self.probe.why_not(await self._image()))
        await super().start()

    def _drop_limits(self, why: str) -> None:
        """Go without limits that apptainer may not set here, if only the task asks for them. Raises SandboxError."""
        if not why:
            return
        for name in ("cpus", "memory_gb"):
            if getattr(self.limits, name) is not None:
                raise SandboxError(f"runtime.limits.{name} cannot be held by apptainer here: leave it out. {why}")
        self.config = self.config.model_copy(update={"cpu": None, "memory": None})

    def cleanup(self) -> None:
        super().cleanup()
        _remove_logs(self._instance)

    def _exec(self, env: dict[str, str], *, stdin: bool = False) -> list[str]:
        hidden = _own(env) | {name: env[name] for name in _made(env)}
        words: list[str] = super()._exec({name: env[name] for name in env if name not in hidden}, stdin=stdin)
        return [*words[:2], "--env-file", str(self._file_of(hidden)), *words[2:]] if hidden else words

    def _file_of(self, hidden: Mapping[str, str]) -> Path:
        """Write variables where a shell reads them, once, for as long as the instance is there."""
        assert self._dir is not None
        # os.fsencode: values may have bytes that are no text.
        content = os.fsencode("".join(f"{name}={shlex.quote(value)}\n" for name, value in hidden.items()))
        path = self._dir / f"{hashlib.sha256(content).hexdigest()}.env"
        if not path.exists():
            path.touch(0o600)
            path.write_bytes(content)
        return path


def _own(env: Mapping[str, str]) -> dict[str, str]:
    """Those of a command's variables that are the worker's, too."""
    return {name: value for name, value in env.items() if os.environ.get(name) == value}


class _Made(NamedTuple):
    """A value with secrets in it."""

    secrets: tuple[str, ...]
    """Names of the worker's variables."""
    word: str
    """What a shell that has them makes the value of."""


def _made(env: Mapping[str, str]) -> dict[str, _Made]:
    """Those of a command's variables that have secrets in them, and are not the worker's, too.

    Raises:
        SandboxError: one has a name that no shell can give to it.
    """
    secrets = {os.environ[name]: name for name in sorted(_hidden) if os.environ.get(name)}
    if not secrets:
        return {}
    longest_first = sorted(secrets, key=len, reverse=True)
    anywhere = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
    own, found = _own(env), {}
    for name, value in env.items():
        parts = anywhere.split(value)
        if name in own or len(parts) == 1:
            continue
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise SandboxError(f"a task's env gives a secret to {name!r}, which is not a name of a variable")
        used = tuple(secrets[part] for part in parts[1::2])
        word = "".join(f'"${secrets[part]}"' if part in secrets else shlex.quote(part) for part in parts if part)
        found[name] = _Made(used, word)
    return found


def _making(made: Mapping[str, _Made], used: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """A shell that makes variables of secrets, puts back what these took the names of, and becomes what follows."""
    back = {
        name: shlex.quote(env[name]) for name in used if env.get(name, used[name]) != used[name] and name not in made
    }
    words = {name: one.word for name, one in made.items()} | back
    exported = " ".join(f"{name}={word}" for name, word in words.items())  # by one command, which sees the secrets only
    gone = "".join(f"unset {name}; " for name in used if name not in env)
    return ["sh", "-c", f'export {exported}; {gone}exec "$@"', "sh"]


def hide_secrets(names: Iterable[str]) -> None:
    """Keep values of variables of this process out of all command lines of its containers, whatever they are part of.

    Args:
        names: of secrets, and of what tasks may make others of.
    """
    _hidden.update(names)


def use_directory(directory: Path) -> None:
    """Have apptainer write below a directory what it writes at home by itself. The user's logins at registries stay.

    Args:
        directory: of the run, on a file system that all its nodes share.
    """
    given = os.environ.get(CONFIG)
    theirs = Path(given) if given else Path.home() / ".apptainer"
    docker = theirs if given else Path.home() / ".docker"  # so apptainer looks for what docker has
    _logins.update({name: theirs / name for name in ("docker-config.json", "remote.yaml")})
    _logins["config.json"] = docker / "config.json"
    os.environ |= {"APPTAINER_CACHEDIR": str(directory / "cache"), CONFIG: str(directory / "config")}


def _link_logins() -> None:
    """Show apptainer the user's logins, where it looks for them now."""
    if config := os.environ.get(CONFIG):
        Path(config).mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, path in _logins.items():
            with contextlib.suppress(FileExistsError):  # another worker's
                if path.is_file():
                    Path(config, name).symlink_to(path)


def _remove_logs(instances: str) -> None:
    """Remove the logs of instances whose names begin so."""
    if config := os.environ.get(CONFIG):
        for path in Path(config).glob(f"instances/logs/*/*/{instances}*"):
            path.unlink(missing_ok=True)


def patch_runtimes(worker: str, shown: Sequence[Path] = (), limits: Limits = _OPEN) -> None:
    """Have verifiers mark the containers of this process.

    Args:
        worker: its name within the run.
        shown: directories of the node that containers see, read-only. With any, scripts run with the packages there.
        limits: the recipe's, of apptainer's. With network none, they reach nothing but the endpoints of their rollout.
    """
    made: dict[str, Any] = {"worker": worker, "shown": tuple(shown)}
    runtimes.DockerRuntime = type("Docker", (_MarkedDocker,), made)
    runtimes.PodmanRuntime = type("Podman", (_MarkedPodman,), made)
    kinds: tuple[type, ...] = (_MarkedApptainer,)
    if limits.network == "none":
        kinds = (PrivateNetwork, _MarkedApptainer)
        os.environ |= PRIVATE_NETWORK
    made |= {"limits": limits, "probe": LimitProbe()}
    runtimes.ApptainerRuntime = type("Apptainer", kinds, made)
    if shown:  # apptainer adds them to the `--bind` of its command line
        before = filter(None, [os.environ.get("APPTAINER_BIND")])
        os.environ["APPTAINER_BIND"] = ",".join([*before, *(f"{path}:{path}:ro" for path in shown)])


def remove_stale(kinds: Iterable[str], worker: str) -> None:
    """Remove containers of this node that a worker of this name has left, of this run.

    Args:
        kinds: types of runtimes to look at; others than containers of the node are passed over.
        worker: its name within the run.
    """
    for kind in kinds:
        try:
            if kind in ("docker", "podman"):
                _sweep_labelled(kind, worker)
            elif kind == "apptainer":  # says that it has failed where there is none
                subprocess.run(
                    [kind, "instance", "stop", "--force", f"{_instances(worker)}*"],
                    capture_output=True,
                    timeout=COMMAND_TIMEOUT_S,
                    check=False,
                )
                _remove_logs(_instances(worker))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("containers that an earlier worker may have left were not looked for: %s", error)


def _sweep_labelled(engine: str, worker: str) -> None:
    labels = (f"{RUN_LABEL}={run_scope()}", f"{WORKER_LABEL}={worker}")
    chosen = [word for label in labels for word in ("--filter", f"label={label}")]
    found = _answer([engine, "ps", "--all", "--quiet", *chosen]).split()
    if found:
        _answer([engine, "rm", "--force", *found])
        log.info("%d containers of %s were left, and are removed", len(found), engine)


def _answer(argv: list[str]) -> str:
    return subprocess.run(
        argv, capture_output=True, encoding="utf-8", errors="replace", timeout=COMMAND_TIMEOUT_S, check=True
    ).stdout


def _instances(worker: str) -> str:
    """How names of a worker's instances begin. Names are the user's on this node, whichever run they are of."""
    return f"vf-{hashlib.sha256(f'{run_scope()} {worker}'.encode()).hexdigest()[:16]}-"
