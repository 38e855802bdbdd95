"""Where the Python scripts that harnesses are made of find their packages.

verifiers has uv install them when a rollout starts, which needs the internet and writes to the home directory. Here,
`primeslurm install --harness NAME` has installed them below the worker's own environment, in `harnesses/NAME`.
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
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import Runtime

from primeslurm.orchestrator.environments.sandbox import bwrap_args

_HEADER = re.compile(r"^# /// script$\n(?P<body>(?:^#(?:| .*)$\n)+?)^# ///$", re.MULTILINE)


class MissingPackagesError(RuntimeError):
    """No environment has what a script asks for.

    Args:
        lacking: what is missing in the one that has most.
    """

    def __init__(self, lacking: Sequence[str]) -> None:
        super().__init__(
            f"not installed: {', '.join(lacking)}; jobs install nothing: `primeslurm install --harness NAME` does"
        )
        self.lacking = tuple(lacking)


@functools.lru_cache(maxsize=64)
def find_python(script: str) -> str:
    """Find the Python that a script (PEP 723) can run with.

    Raises:
        MissingPackagesError: there is none.
    """
    python, wanted = _asked(script)
    lacking: list[str] = []
    for place in _environments():
        have, version = _installed(place)
        unmet = [str(each) for each in wanted if not _met(each, have)]
        if version not in python:
            unmet.append(f"Python {python}")
        if not unmet:
            return str(place / "bin" / "python")
        lacking = unmet if not lacking or len(unmet) < len(lacking) else lacking
    raise MissingPackagesError(lacking)


def prepared(script: str | bytes) -> tuple[str, str]:
    """Return a script's text and the Python that it runs with. Raises SandboxError if there is none."""
    text = script if isinstance(script, str) else script.decode()
    try:
        return text, interpreter(text)
    except MissingPackagesError as error:
        raise SandboxError(str(error)) from error


async def put(runtime: Runtime, script: str | bytes, activate: bool) -> list[str]:
    """Put a script into a runtime that sees the node's environments, once.

    Args:
        runtime: whose programs are to run it.
        script: text of it.
        activate: what it starts finds its Python and programs, too.

    Returns:
        The words that run it.

    Raises:
        SandboxError: no environment has its packages, or it cannot be written.
    """
    text, python = prepared(script)
    user = "" if runtime.user is None else f"-{runtime.user}"
    path = f"{runtime.scripts_dir}{user}/{hashlib.sha256(text.encode()).hexdigest()}.py"
    if path not in runtime._uv_interpreters:
        await runtime.write(path, text.encode())
        runtime._uv_interpreters[path] = python
    if not activate:
        return [python, path]
    words = 'export VIRTUAL_ENV="$1" PATH="$1/bin:$PATH"; shift; exec "$@"'
    return ["sh", "-c", words, "script", str(Path(python).parent.parent), python, path]


def environment_directories() -> tuple[Path, ...]:
    """The environments that scripts run in, and the installations of Python that these are made from."""
    found = dict.fromkeys(_environments())
    for place in tuple(found):
        python = place / "bin" / "python"
        found |= dict.fromkeys([python.resolve().parents[1]])
        if python.is_symlink() and python.readlink().is_absolute():  # a name that may lead to another one
            found |= dict.fromkeys([python.readlink().parents[1]])
    return tuple(bwrap_args.outermost(found))


def _environments() -> tuple[Path, ...]:
    return (Path(sys.prefix), *sorted(Path(sys.prefix).glob("harnesses/*")))


def _asked(script: str) -> tuple[SpecifierSet, list[Requirement]]:
    header = _HEADER.search(script)
    lines = header["body"].splitlines() if header else []
    about = tomllib.loads("\n".join(line[2:] for line in lines))
    return SpecifierSet(about.get("requires-python", "")), [Requirement(text) for text in about.get("dependencies", [])]


def _met(wanted: Requirement, have: dict[str, str]) -> bool:
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    version = have.get(_normal(wanted.name))
    return version is not None and wanted.specifier.contains(version, prereleases=True)


@functools.cache
def _installed(place: Path) -> tuple[dict[str, str], str]:
    """Packages of an environment, and its Python's version."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    directories = [str(path) for path in place.glob("lib/python3*/site-packages")]
    if place != Path(sys.prefix):
        settings = dict(
            line.split(" = ", 1)
            for line in os.fsdecode((place / "pyvenv.cfg").read_bytes()).splitlines()
            if " = " in line
        )
        version = settings.get("version_info", settings.get("version", version))
    elif not (place / "pyvenv.cfg").is_file():
        directories = sys.path
    found = importlib.metadata.distributions(path=directories)
    return {_normal(each.metadata["Name"]): each.version for each in found}, version


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
