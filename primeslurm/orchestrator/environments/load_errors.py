"""What an environment that does not load says: a user's mistakes field by field, an exception with its place."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version
from pydantic import BaseModel, ValidationError
from verifiers.v1.utils.loaders import builtin_harness_ids

from primeslurm.base.errors import Violation

_WORDS = 300
"""Characters of a message that are shown."""
_REMOVED = re.compile(
    r"module 'verifiers' has no attribute '(\w+)'|cannot import name '(\w+)' from 'verifiers' "
    r"|No module named 'verifiers\.(?!v1\b)([\w.]+)'"
)
_PART = re.compile(r"(?P<kind>harness|environment|judge) '(?P<id>[^']+)' not found")


def invalid(
    error: ValidationError, env: type[BaseModel], taskset: type[BaseModel], said: Mapping[str, Any]
) -> list[Violation]:
    """Name what an environment's configuration does not take, each by the field of the recipe.

    Args:
        error: of a configuration made of a taskset's options and those of the Env around it.
        env: type of the Env's options.
        taskset: type of the taskset's.
        said: the Env's options as `args.env` has them; what is not among them, fields of the environment say.
    """
    return [_invalid(each, env, taskset, said) for each in error.errors(include_url=False)]


def _invalid(
    error: Mapping[str, Any], env: type[BaseModel], taskset: type[BaseModel], said: Mapping[str, Any]
) -> Violation:
    words = [str(part) for part in error["loc"]]
    of_taskset = words[:1] == ["taskset"]
    kind, words = (taskset, words[1:]) if of_taskset else (env, words)
    field = ".".join(["environments.args", *([] if of_taskset else ["env"]), *words])
    if words[1:2] in (["harness"], ["runtime"]) and not of_taskset and words[1] not in (said.get(words[0]) or {}):
        field = ".".join(["environments", *words[1:]])
    if error["type"] != "extra_forbidden":
        value = "" if isinstance(error["input"], Mapping) else str(error["input"])[:_WORDS]
        why = str(error["msg"]).removeprefix("Value error, ")
        return Violation(field, value, why[:1].lower() + why[1:])
    known = sorted(_fields(kind, words[:-1]))
    close = difflib.get_close_matches(words[-1], known, n=1)
    fix = f"nearest: {close[0]}" if close else f"it takes {', '.join(known)}" if known else ""
    return Violation(field, str(error["input"])[:_WORDS], "the environment takes no such argument", fix)


def _fields(kind: type[BaseModel], path: Sequence[str]) -> set[str]:
    """Fields of the part of a configuration that a path leads to, as far as its types say."""
    part: Any = kind
    for word in path:
        field = part.model_fields.get(word) if isinstance(part, type) and issubclass(part, BaseModel) else None
        part = field.annotation if field is not None else None
    if not (isinstance(part, type) and issubclass(part, BaseModel)):
        return set()
    return set(part.model_fields) - {"id"}


def absent_part(error: ModuleNotFoundError) -> Violation | None:
    """Name the harness (or another part that verifiers looks up by name) that is not there, if it is one."""
    found = _PART.match(str(error))
    if found is None:
        return None
    known = builtin_harness_ids() if found["kind"] == "harness" else []
    close = difflib.get_close_matches(found["id"], known, n=1)
    fix = f"nearest: {close[0]}" if close else f"with verifiers come {', '.join(known)}" if known else ""
    field = "environments.harness.id" if found["kind"] == "harness" else f"environments.args.env.{found['kind']}"
    return Violation(field, found["id"], f"no such {found['kind']}", fix)


def absent_module(error: ModuleNotFoundError, name: str) -> Violation | None:
    """Name the other module that an installed environment lacks; None if the environment itself is not there."""
    cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    missing = cause.name or ""
    if not missing or missing.split(".")[-1] == module_of(name):
        return None
    why = f"needs the module {missing}, which is not installed"
    return Violation("environments.id", name, why, "install it beside the environment")


def outdated(error: BaseException, name: str) -> Violation | None:
    """Say that an environment is for verifiers before 0.4, which had its parts in `verifiers` itself; None if not.

    Args:
        error: that it was loaded with.
        name: of the environment.
    """
    sign = _requirement(name) or _removed(error) or _old_entry(name)
    if not sign:
        return None
    why = f"it is made for verifiers before 0.4 ({sign}), and verifiers {importlib.metadata.version('verifiers')} runs"
    fix = "install a version for verifiers 0.4, or port it: its tasks become a taskset (docs/how-to/environments.md)"
    return Violation("environments.id", name, why, fix)


def _requirement(name: str) -> str:
    """What an environment's package requires of verifiers, if the version that is installed does not do."""
    installed = Version(importlib.metadata.version("verifiers"))
    for package in importlib.metadata.packages_distributions().get(module_of(name), ()):
        for line in importlib.metadata.requires(package) or ():
            try:
                required = Requirement(line)
            except InvalidRequirement:
                continue
            if required.name != "verifiers" or required.specifier.contains(installed, prereleases=True):
                continue
            upper = [each for each in required.specifier if each.operator in ("<", "<=", "==", "~=")]
            if any(Version(each.version.removesuffix(".*")) <= installed for each in upper):
                return f"{package} requires {required.name}{required.specifier}"
    return ""


def _removed(error: BaseException) -> str:
    """The part of `verifiers` itself that an import asks for in vain."""
    each: BaseException | None = error
    while each is not None:
        if found := _REMOVED.search(str(each)):
            return f"it uses verifiers.{next(filter(None, found.groups()))}"
        each = each.__cause__ or each.__context__
    return ""


def _old_entry(name: str) -> str:
    """How a module offers itself as verifiers before 0.4 wanted it, if it does."""
    module = sys.modules.get(module_of(name))
    old = module is not None and hasattr(module, "load_environment") and not hasattr(module, "__all__")
    return "it has load_environment() and exports no taskset" if old else ""


def module_of(name: str) -> str:
    """Name the module that verifiers imports for an environment's id."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def unbound_toolsets(env: vf.Env) -> tuple[str, str, str] | None:
    """Tell of a `toolsets` that only an instance can be asked, as verifiers asks the class: what it is, why, a fix."""
    for kind in (type(env.taskset), type(env.taskset).task_type()):
        if inspect.isfunction(inspect.getattr_static(kind, "toolsets")):
            return f"{kind.__name__}.toolsets", "its class is asked for its tools, not an instance", "`@classmethod`"
    return None


def raised(error: BaseException, name: str) -> str:
    """Tell an exception in one line: type, message, and the last frame in the environment's own code."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    words = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {words[0][:_WORDS]}" if words[0] else type(error).__name__
    place = where(reversed(frames), name)
    return f"{text} ({place})" if place else text


def where(frames: Iterable[tuple[str, int, str]], name: str) -> str:
    """Find the place in an environment's own code.

    Args:
        frames: file, line and function of each, innermost first.
        name: of the environment.

    Returns:
        The first frame that is the environment's, in words; empty if none is.
    """
    own = _directory(name)
    if own is None:
        return ""
    for file, line, function in frames:
        path = Path(file)
        if path == own or own in path.parents:
            return f"{path.relative_to(own.parent)}, line {line}, in {function}"
    return ""


def _directory(name: str) -> Path | None:
    """Where an environment's code is: its package's directory, or its module's file."""
    for module in (f"verifiers.v1.tasksets.{module_of(name)}", module_of(name)):
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            return origin.parent if spec.submodule_search_locations else origin
    return None
