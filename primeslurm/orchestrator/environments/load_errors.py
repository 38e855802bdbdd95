"""Explain why an environment does not load: wrong options by field, other errors with their place in its code."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version
from pydantic import BaseModel, ValidationError
from verifiers.v1.utils.loaders import builtin_harness_ids

from primeslurm.base.errors import Violation
from primeslurm.recipe.rules.sandboxes import module_name
from primeslurm.wire.probe_messages import UNKNOWN

_ID = "environments.id"
HARNESS = "environments.harness.id"
# Characters of a value or message that are shown.
_MAX_TEXT = 300
# Error messages about parts of `verifiers` that version 0.4 has removed.
_REMOVED = re.compile(
    r"module 'verifiers' has no attribute '(\w+)'|cannot import name '(\w+)' from 'verifiers' "
    r"|No module named 'verifiers\.(?!v1\b)([\w.]+)'"
)
_PLUGIN = re.compile(r"(?P<kind>harness|environment|judge) '(?P<id>[^']+)' not found")


def invalid_options(
    error: ValidationError, env: type[BaseModel], taskset: type[BaseModel], env_args: Mapping[str, Any]
) -> list[Violation]:
    """Name each wrong option of an Env (`env_args` of the recipe), and of its taskset, by its field of the recipe."""
    return [_invalid_option(each, env, taskset, env_args) for each in error.errors(include_url=False)]


def invalid_part(kind: type[BaseModel], options: Mapping[str, Any], field: str) -> list[Violation]:
    """Name each wrong option of a taskset or harness by its field, which lies below `field`."""
    try:
        kind.model_validate(options)
    except ValidationError as error:
        return [_violation(each, kind, [str(part) for part in each["loc"]], field) for each in error.errors()]
    return []


def _invalid_option(
    error: Mapping[str, Any], env: type[BaseModel], taskset: type[BaseModel], env_args: Mapping[str, Any]
) -> Violation:
    path = [str(part) for part in error["loc"]]
    of_taskset = path[:1] == ["taskset"]
    if of_taskset:
        return _violation(error, taskset, path[1:], "environments.args")
    # agent.harness or agent.runtime: without an entry in `args.env`, the recipe's own field has the option.
    if path[1:2] in (["harness"], ["runtime"]) and path[1] not in (env_args.get(path[0]) or {}):
        return _violation(error, env, path, "environments", hidden=1)
    return _violation(error, env, path, "environments.args.env")


def _violation(
    error: Mapping[str, Any], kind: type[BaseModel], path: Sequence[str], above: str, hidden: int = 0
) -> Violation:
    """Describe an error of pydantic at `path` in `kind`. The recipe has no counterpart of its first `hidden` parts."""
    field = ".".join([above, *path[hidden:]])
    if error["type"] != "extra_forbidden":
        value = "" if isinstance(error["input"], Mapping) else str(error["input"])[:_MAX_TEXT]
        why = str(error["msg"]).removeprefix("Value error, ")
        return Violation(field, value, why[:1].lower() + why[1:])
    options = sorted(_options_at(kind, path[:-1]))
    fix = _nearest(path[-1], options) or (f"it takes {', '.join(options)}" if options else "")
    return Violation(field, str(error["input"])[:_MAX_TEXT], "the environment takes no such argument", fix)


def nearest_harness(word: str) -> str:
    """Return the harness of verifiers that was probably meant; empty if none is similar."""
    return "bash" if word == "default" else next(iter(difflib.get_close_matches(word, builtin_harness_ids(), n=1)), "")


def _nearest(word: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1)
    return f"nearest: {close[0]}" if close else ""


def _options_at(kind: type[BaseModel], path: Sequence[str]) -> set[str]:
    part: Any = kind
    for name in path:
        field = part.model_fields.get(name) if isinstance(part, type) and issubclass(part, BaseModel) else None
        part = field.annotation if field is not None else None
    if not (isinstance(part, type) and issubclass(part, BaseModel)):
        return set()
    return set(part.model_fields) - {"id"}


def load_failure(error: BaseException, name: str, bundled: Sequence[str]) -> Violation:
    """Explain an error, other than wrong options, that loading environment `name` has raised.

    `bundled` are the ids of the bundled environments, for suggestions.
    """
    # An old package fails in many ways, for example with an AttributeError, so look for one first.
    if reason := _requires_old_verifiers(name) or _uses_removed(error) or _has_old_entry_point(name):
        version = importlib.metadata.version("verifiers")
        why = f"it is made for verifiers before 0.4 ({reason}), and verifiers {version} runs"
        fix = "install a version for verifiers 0.4, or port its tasks to a taskset (docs/how-to/environments.md)"
        return Violation(_ID, name, why, fix)
    if not isinstance(error, ModuleNotFoundError):
        return Violation(_ID, name, describe(error, name))
    # verifiers raises this error for missing plugins, with the name of the kind in its text.
    if plugin := _PLUGIN.match(str(error)):
        kind, plugin_id = plugin["kind"], plugin["id"]
        shipped = builtin_harness_ids() if kind == "harness" else []
        fix = _nearest(plugin_id, shipped) or (f"with verifiers come {', '.join(shipped)}" if shipped else "")
        field = HARNESS if kind == "harness" else f"environments.args.env.{kind}"
        return Violation(field, plugin_id, f"no such {kind}", fix)
    if str(error).startswith("the `default` harness was renamed"):
        return Violation(HARNESS, "default", "has another name now", "use bash")
    # verifiers chains its own error to the one of the import, which names the module.
    cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    if cause.name and cause.name.split(".")[-1] != module_name(name):
        why = f"needs the module {cause.name}, which is not installed"
        return Violation(_ID, name, why, "install it beside the environment")
    installed = [package.replace("_", "-") for package in importlib.metadata.packages_distributions()]
    close = difflib.get_close_matches(name, [*bundled, *installed], n=1)
    fix = f"did you mean {close[0]}?" if close else f"bundled: {', '.join(bundled)}; others must be installed"
    return Violation(_ID, name, UNKNOWN, fix)


def _requires_old_verifiers(name: str) -> str:
    installed = Version(importlib.metadata.version("verifiers"))
    for package in importlib.metadata.packages_distributions().get(module_name(name), ()):
        for line in importlib.metadata.requires(package) or ():
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if requirement.name != "verifiers" or requirement.specifier.contains(installed, prereleases=True):
                continue
            upper = [each for each in requirement.specifier if each.operator in ("<", "<=", "==", "~=")]
            if any(Version(each.version.removesuffix(".*")) <= installed for each in upper):
                return f"{package} requires {requirement.name}{requirement.specifier}"
    return ""


def _uses_removed(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if match := _REMOVED.search(str(cause)):
            return f"it uses verifiers.{next(filter(None, match.groups()))}"
        cause = cause.__cause__ or cause.__context__
    return ""


def _has_old_entry_point(name: str) -> str:
    module = sys.modules.get(module_name(name))
    is_old = module is not None and hasattr(module, "load_environment") and not hasattr(module, "__all__")
    return "it has load_environment() and exports no taskset" if is_old else ""


def unbound_toolsets(env: vf.Env) -> Violation | None:
    """Refuse a `toolsets` method that needs an instance, because verifiers calls it on the class."""
    for kind in (type(env.taskset), type(env.taskset).task_type()):
        if inspect.isfunction(inspect.getattr_static(kind, "toolsets")):
            why = "verifiers calls it on the class, not on an instance"
            return Violation(_ID, f"{kind.__name__}.toolsets", why, "mark it `@classmethod`")
    return None


def describe(error: BaseException, name: str) -> str:
    """Describe an exception in one line: type, message, and the innermost frame in the environment's own code."""
    message = (str(error).strip().splitlines() or [""])[0]
    code = _code_of(name)
    if message and isinstance(error, ValueError) and code is not None and Path(__file__).parent in code.parents:
        return message[:_MAX_TEXT]  # written for users, so they need no line of our code
    text = f"{type(error).__name__}: {message[:_MAX_TEXT]}" if message else type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if code is not None and (path == code or code in path.parents):
            return f"{text} ({path.relative_to(code.parent)}, line {frame.lineno or 0}, in {frame.name})"
    return text


def _code_of(name: str) -> Path | None:
    for module in (f"verifiers.v1.tasksets.{module_name(name)}", module_name(name)):
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            return origin.parent if spec.submodule_search_locations else origin
    return None
