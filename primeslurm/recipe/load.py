"""From YAML on disk to validated models: `extends`, `--set`, and every violation at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from primeslurm.errors import UsageError, Violation
from primeslurm.recipe.model import Recipe
from primeslurm.recipe.rules import violations
from primeslurm.recipe.site import Site
from primeslurm.recipe.text import text_problems

M = TypeVar("M", bound=BaseModel)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, merge what it extends, apply `a.b=value` overrides, validate.

    Raises:
        UsageError: with everything that is wrong.
    """
    data = _apply_overrides(_read_extended(path, seen=()), overrides)
    recipe = _validate(Recipe, data, str(path))
    if found := text_problems(recipe) + violations(recipe):
        raise UsageError(found)
    return recipe


def load_site(path: Path) -> Site:
    """Read a site file. Raises UsageError."""
    site = _validate(Site, _read_yaml(path), str(path))
    if found := text_problems(site):
        raise UsageError(found)
    return site


def suggestion(given: str, valid: Sequence[str]) -> str:
    """'did you mean X?', or the list of valid choices if nothing is near."""
    near = difflib.get_close_matches(given, valid, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"valid: {', '.join(sorted(valid))}" if valid else ""


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            [Violation(str(path), "", f"cannot be read: {reason}", suggestion(path.name, siblings))]
        ) from None
    try:
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError([Violation(where, "", f"not valid YAML: {error.problem or error.context}")]) from None
    except yaml.YAMLError as error:
        raise UsageError([Violation(str(path), "", f"not valid YAML: {error}")]) from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise UsageError([Violation(str(path), "", f"must be a mapping of keys to values, is {kind}")])
    return data


def _read_extended(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise UsageError([Violation("extends", path.name, f"goes in a circle: {chain}")])
    data = _read_yaml(path)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise UsageError([Violation("extends", repr(parent), "must be one relative path")])
    return merge(_read_extended(path.parent / parent, (*seen, path)), data)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge: mappings merge key by key, everything else (lists too) replaces.

    A mapping with another `type` replaces too: its keys belong to another kind of section.
    """
    if "type" in over and over["type"] != base.get("type", over["type"]):
        return dict(over)
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return result


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    problems: list[Violation] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            problems.append(Violation("--set", override, "must be key.path=value"))
            continue
        try:
            _set(data, key.split("."), yaml.safe_load(text))
        except yaml.YAMLError:
            problems.append(Violation(f"--set {key}", text, "the value is not valid YAML"))
        except (IndexError, ValueError, TypeError):
            problems.append(Violation(f"--set {key}", text, "there is no such place in the recipe"))
    if problems:
        raise UsageError(problems)
    return data


def _set(node: Any, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    if isinstance(node, list):
        node[int(keys[-1])] = value
    else:
        node[keys[-1]] = value


def _validate(model: type[M], data: Mapping[str, Any], source: str) -> M:
    if "schema" not in data:
        data = {"schema": 1, **data} if model is Site else data
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UsageError([_violation(model, details, source) for details in error.errors()]) from None


def _violation(model: type[BaseModel], details: Any, source: str) -> Violation:
    path, parent = _walk(model, details["loc"])
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        names = [info.alias or name for name, info in parent.model_fields.items()] if parent else []
        return Violation(path, _show(details["input"]), "no such key", suggestion(path.rsplit(".", 1)[-1], names))
    if kind == "missing":
        return Violation(path, "", f"is required but missing in {source}")
    if kind == "union_tag_not_found":
        tags = [
            tag for member in _members(_field(parent, details["loc"][-1]) if parent else None) if (tag := _tag(member))
        ]
        return Violation(f"{path}.type", "", f"is required but missing in {source}", suggestion("", tags))
    if kind in {"literal_error", "union_tag_invalid"}:
        expected = str(context.get("expected") or context.get("expected_tags", ""))
        valid = [part.strip(" '\"") for part in expected.replace(" or ", ", ").split(",")]
        given = context.get("tag", details["input"])
        return Violation(path, _show(given), "is not a valid choice", suggestion(str(given), valid))
    why = details["msg"].removeprefix("Value error, ")
    fix = context.get("fix", "") if kind == "syntax" else ""
    return Violation(path, _show(details["input"]), why if kind == "syntax" else why[0].lower() + why[1:], fix)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _walk(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, type[BaseModel] | None]:
    """The path as the user writes it (union tags left out), and the section that holds its last key."""
    path: list[str] = []
    current: Any = model
    parent: type[BaseModel] | None = None
    for part in loc:
        if part == "[key]":  # pydantic's word for the key of a mapping, after the key itself
            continue
        options = _members(current)
        tagged = [member for member in options if _tag(member) == part]
        if tagged and len(options) > 1:
            current = tagged[0]
            continue
        path.append(str(part))
        parent = next((m for m in options if isinstance(m, type) and issubclass(m, BaseModel)), None)
        current = _field(parent, part) if parent is not None else _element(options)
    return ".".join(path), parent


def _field(section: type[BaseModel], key: int | str) -> Any:
    """The annotation of a field, by name or alias; None if there is none."""
    return next((info.annotation for name, info in section.model_fields.items() if key in (name, info.alias)), None)


def _element(options: Sequence[Any]) -> Any:
    """The annotation of what a tuple or mapping holds; None for anything else."""
    inner = [[arg for arg in get_args(option) if arg is not Ellipsis] for option in options]
    return next((args[-1] for args in inner if args), None)


def _members(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [m for arg in get_args(annotation) if arg is not type(None) for m in _members(arg)]
    return [annotation]


def _tag(member: Any) -> str | None:
    if isinstance(member, type) and issubclass(member, BaseModel) and "type" in member.model_fields:
        values = get_args(member.model_fields["type"].annotation)
        return str(values[0]) if values else None
    return None
