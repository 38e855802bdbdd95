"""Python interpreters for harnesses that are scripts with inline dependencies (PEP 723).

verifiers lets uv install the dependencies when a rollout starts, which needs the internet and writes to the home
directory. Here, `primeslurm install --harness NAME` has installed them beforehand, in `harnesses/NAME` of the worker's
Python environment.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import Runtime

from primeslurm.orchestrator.environments.sandbox import bwrap_args

_HEADER = re.compile(r"^# /// script$\n(?P<body>(?:^#(?:| .*)$\n)+?)^# ///$", re.MULTILINE)


class MissingPackagesError(RuntimeError):
    """No environment has all dependencies of a script. `missing` lists those that the closest environment lacks."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(
            f"not installed: {', '.join(missing)}; jobs install no packages, `primeslurm install --harness NAME` does"
        )
        self.missing = tuple(missing)


@functools.lru_cache(maxsize=64)
def find_python(script: str) -> str:
    """Return the path of a Python that has a script's dependencies. Raises MissingPackagesError."""
    python_versions, requirements = _read_header(script)
    fewest_missing: list[str] = []
    for environment in _environments():
        packages, version = _installed(environment)
        missing = [str(each) for each in requirements if not _is_met(each, packages)]
        if version not in python_versions:
            missing.append(f"Python {python_versions}")
        if not missing:
            return str(environment / "bin" / "python")
        if not fewest_missing or len(missing) < len(fewest_missing):
            fewest_missing = missing
    raise MissingPackagesError(fewest_missing)


def text_and_python(script: str | bytes) -> tuple[str, str]:
    """Return a script's text and the Python that runs it. Raises SandboxError if there is none."""
    text = script if isinstance(script, str) else script.decode()
    try:
        return text, find_python(text)
    except MissingPackagesError as error:
        raise SandboxError(str(error)) from error


async def upload(runtime: Runtime, script: str | bytes, activate: bool) -> list[str]:
    """Write a script into a runtime that sees the node's environments, once, and return the command that runs it.

    With `activate`, programs that the script starts find its Python on PATH. Raises SandboxError if no environment has
    the script's dependencies, or if the file cannot be written.
    """
    text, python = text_and_python(script)
    # Files are per user, because another user could not read or replace them.
    user = "" if runtime.user is None else f"-{runtime.user}"
    path = f"{runtime.scripts_dir}{user}/{hashlib.sha256(text.encode()).hexdigest()}.py"
    if path not in runtime._uv_interpreters:
        await runtime.write(path, text.encode())
        runtime._uv_interpreters[path] = python
    if not activate:
        return [python, path]
    activation = 'export VIRTUAL_ENV="$1" PATH="$1/bin:$PATH"; shift; exec "$@"'
    return ["sh", "-c", activation, "script", str(Path(python).parent.parent), python, path]


def environment_directories() -> tuple[Path, ...]:
    """Return the directories that scripts need: the environments, and the Python installations they are based on."""
    paths = dict.fromkeys(_environments())
    for environment in tuple(paths):
        python = environment / "bin" / "python"
        paths |= dict.fromkeys([python.resolve().parents[1]])
        # uv links to a name such as cpython-3.11, which itself is a link. The name must exist inside, too.
        if python.is_symlink() and python.readlink().is_absolute():
            paths |= dict.fromkeys([python.readlink().parents[1]])
    return tuple(bwrap_args.outermost(paths))


def _environments() -> tuple[Path, ...]:
    return (Path(sys.prefix), *sorted(Path(sys.prefix).glob("harnesses/*")))


def _read_header(script: str) -> tuple[SpecifierSet, list[Requirement]]:
    match = _HEADER.search(script)
    lines = match["body"].splitlines() if match else []
    header = tomllib.loads("\n".join(line[2:] for line in lines))
    dependencies = [Requirement(text) for text in header.get("dependencies", [])]
    return SpecifierSet(header.get("requires-python", "")), dependencies


def _is_met(requirement: Requirement, packages: dict[str, str]) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    version = packages.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


@functools.cache
def _installed(environment: Path) -> tuple[dict[str, str], str]:
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    directories = [str(path) for path in environment.glob("lib/python3*/site-packages")]
    if environment != Path(sys.prefix):
        lines = os.fsdecode((environment / "pyvenv.cfg").read_bytes()).splitlines()
        settings = dict(line.split(" = ", 1) for line in lines if " = " in line)
        version = settings.get("version_info", settings.get("version", version))
    elif not (environment / "pyvenv.cfg").is_file():
        directories = sys.path
    packages = importlib.metadata.distributions(path=directories)
    return {canonicalize_name(each.metadata["Name"]): each.version for each in packages}, version
