"""From an error of pydantic to a fault: the field as the user writes it, the value, why, and what to write instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from primeslurm.base.errors import Violation

if TYPE_CHECKING:
    from primeslurm.recipe.reading.alias_table import Alias

_WHOLE, _NUMBER, _SWITCH = "must be a whole number", "must be a number", "must be true or false"
_SECTION, _LIST = "must be a section of keys and values", "must be a list"
_WORDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), _WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), _NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), _SWITCH),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), _SECTION),
    **dict.fromkeys(("tuple_type", "list_type"), _LIST),
    "finite_number": "must be a finite number",
    "string_type": "must be text",
}
"""Types of pydantic's errors whose own words speak of Python."""
_BOUNDS = {
    "greater_than": ("gt", "must be greater than {}", 1),
    "greater_than_equal": ("ge", "must be at least {}", 0),
    "less_than": ("lt", "must be less than {}", -1),
    "less_than_equal": ("le", "must be at most {}", 0),
}
"""Types of errors: the bound's name, the words, and how far from it the nearest whole number is."""


_MANY = 3
"""A key that has more places than these says nothing about which one was meant."""
_TYPO = 0.8
"""Likeness, from 0 to 1, from which on a key is a misspelt one and no name of another tool."""


RECIPE, SITE_FILE = "recipe", "site file"


@dataclass(frozen=True)
class OtherFile:
    """The site file of a recipe, or the recipe for a site file."""

    name: str
    """`RECIPE` or `SITE_FILE`."""
    model: type[BaseModel]


@dataclass(frozen=True)
class InputFault:
    """One thing wrong with the input, and which part of the input it concerns."""

    violation: Violation
    path: tuple[str, ...]
    """Keys and list indices from the top of the file."""
    meant: str = ""
    """For a key that does not exist: the one field that was probably meant, with dots; empty if there is none."""


def faults(model: type[BaseModel], details: Any, source: str, other: OtherFile | None = None) -> list[InputFault]:
    """Explain one error of pydantic to the person who wrote the input.

    Args:
        model: what the input was validated as.
        details: one of pydantic's errors, as `ValidationError.errors` gives it.
        source: the file, which is named if something is missing in it.
        other: the file that a key may belong in instead.

    Returns:
        One fault. An unknown section that holds keys of other tools has one for each of these keys.
    """
    from primeslurm.recipe.reading.aliases import find_value  # every process imports this module, and few see faults

    path, parent = _walk(model, details["loc"])
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    field = ".".join(path)
    if kind == "extra_forbidden":
        return _unknown(model, parent, path, value, other)
    if kind == "invalid_key":  # pydantic makes numbers of `on` and `yes`, which YAML reads as true
        path = (*path[:-1], str(value))
        return [InputFault(Violation(".".join(path), "", "a key must be text", "write it in quotes"), path)]
    if kind == "missing":
        return [InputFault(Violation(field, "", f"is required but missing in {source}"), path)]
    if kind == "union_tag_not_found":
        tags = [tag for member in members(field_type(parent, details["loc"][-1])) if (tag := _tag(member))]
        missing = Violation(f"{field}.type", "", f"is required but missing in {source}", suggestion("", tags))
        return [InputFault(missing, (*path, "type"))]
    if kind in {"literal_error", "union_tag_invalid"}:
        expected = str(context.get("expected") or context.get("expected_tags", ""))
        valid = [part.strip(" '\"") for part in expected.replace(" or ", ", ").split(",")]
        path, given = (path, value) if kind == "literal_error" else ((*path, "type"), value["type"])
        field = ".".join(path)
        alias = find_value(field, str(given))
        fix = alias.advice if alias else suggestion(str(given), valid)
        return [InputFault(Violation(field, _show(given), "is not a valid choice", fix), path)]
    return [InputFault(Violation(field, _show(value), *_why(kind, context, details["msg"], value)), path)]


def _unknown(
    model: type[BaseModel],
    parent: type[BaseModel] | None,
    path: tuple[str, ...],
    value: object,
    other: OtherFile | None,
) -> list[InputFault]:
    """Explain a key that does not exist: by the names of other tools, by the fields elsewhere, or by spelling.

    An unknown section is explained by its keys, because one of them may be a name of another tool.
    """
    from primeslurm.recipe.reading.aliases import find_alias

    names = [info.alias or name for name, info in parent.model_fields.items()] if parent else []
    typo = bool(difflib.get_close_matches(path[-1], names, n=1, cutoff=_TYPO))
    if other and not path[1:] and _belongs_in(other.model, path[0], value):
        violation = Violation(path[0], "", f"belongs in the {other.name}", f"move it to the {other.name}")
        return [InputFault(violation, path)]
    whole = find_alias(".".join(path))
    if isinstance(value, Mapping) and value and not typo:
        aliases = [(leaf, given, find_alias(".".join(leaf))) for leaf, given in _leaves(value, path)]
        if any(alias for _, _, alias in aliases):
            found = [_foreign(other, leaf, given, alias) for leaf, given, alias in aliases if alias]
            others = [leaf for leaf, _, alias in aliases if not alias]
            return [*found, _no_section(path, others, whole.advice if whole else "")] if others else found
    elsewhere = fields_named(model, path[-1])
    here = 0 < len(elsewhere) <= _MANY and not (typo and path[1:])  # a likely field of the same section comes first
    if alias := find_alias(".".join(path), least=2 if here or typo else 1):
        return [_foreign(other, path, value, alias)]
    meant = ""
    if here:
        fix, meant = f"did you mean {' or '.join(elsewhere)}?", elsewhere[0] if len(elsewhere) == 1 else ""
    elif near := _nearest(path[-1], names):
        fix, meant = f"did you mean {near}?", ".".join((*path[:-1], near))
    else:
        fix = suggestion(path[-1], names)
    if isinstance(value, Mapping) and value:
        return [_no_section(path, [leaf for leaf, _ in _leaves(value, path)], fix, meant)]
    return [InputFault(Violation(".".join(path), _show(value), "no such key", fix), path, meant)]


def _no_section(path: tuple[str, ...], keys: Sequence[tuple[str, ...]], fix: str, meant: str = "") -> InputFault:
    """Explain that a section does not exist, and name the first keys of it as they were typed."""
    above = f" in {'.'.join(path[:-1])}" if path[1:] else ""
    typed = ", ".join(".".join(key) for key in keys[:_MANY])
    typed += f" and {len(keys) - _MANY} more" if len(keys) > _MANY else ""
    return InputFault(Violation(typed, "", f"there is no section {path[-1]}{above}", fix), path, meant)


def _belongs_in(model: type[BaseModel], key: str, value: object) -> bool:
    """Say whether a key is one of another file's.

    A single value where the other file has a section is no section of it: `nodes: 4` comes from another tool.
    """
    kinds = [get_origin(kind) or kind for kind in members(field_type(model, key)) if kind is not None]
    single = isinstance(value, str | int | float) and all(_holds_keys(kind) for kind in kinds)
    return bool(kinds) and not single


def _holds_keys(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mapping | BaseModel)


def _foreign(other: OtherFile | None, path: tuple[str, ...], value: object, alias: Alias) -> InputFault:
    shown = "" if isinstance(value, Mapping) else _show(value)
    of_other = alias.of_site != (other is not None and other.name == RECIPE)
    meant = "" if of_other or "[]" in alias.field else alias.field
    advice = f"in the recipe, {alias.advice}" if of_other and not alias.of_site else alias.advice
    return InputFault(Violation(".".join(path), shown, "no such key", advice), path, meant)


def _leaves(value: Mapping[Any, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """List the keys of nested sections that hold values, with their paths."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, (*above, str(key)))
        else:
            yield (*above, str(key)), item


def _why(kind: str, context: Mapping[str, Any], message: str, value: object) -> tuple[str, str]:
    """Why a value cannot stand there, and the nearest that can."""
    if kind == "syntax":
        return message, context.get("fix", "")
    if kind in _BOUNDS:
        name, words, step = _BOUNDS[kind]
        bound = f"{context[name]:g}" if isinstance(context[name], float) else context[name]
        if step and not (isinstance(value, int) and isinstance(context[name], int)):  # of a fraction, none is nearest
            return words.format(bound), ""
        return words.format(bound), f"nearest: {int(context[name]) + step if step else bound}"
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    if kind == "string_type" and plain:
        return _WORDS[kind], f'nearest: "{value}"'
    if _WORDS.get(kind) == _LIST and plain:
        return _LIST, f"nearest: [{value}]"
    why = message.removeprefix("Value error, ")
    return _WORDS.get(kind) or why[0].lower() + why[1:], ""


def suggestion(given: str, valid: Sequence[str]) -> str:
    """Suggest the nearest choice ('did you mean X?'), or list the valid ones if nothing is near."""
    near = _nearest(given, valid)
    if near:
        return f"did you mean {near}?"
    return f"valid: {', '.join(sorted(valid))}" if valid else ""


def closest(name: str, ready: Sequence[str]) -> str:
    """Name up to three ready recipes that look like a name, and how to list all of them."""
    near = difflib.get_close_matches(name.removesuffix(".yaml"), ready, n=3, cutoff=0.5)
    return (f"did you mean {', '.join(near)}? " if near else "") + "`primeslurm recipes` lists the ready ones"


def _nearest(given: str, valid: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(given, valid, n=1, cutoff=0.5)), "")


def fields_named(section: type[BaseModel], key: str, above: str = "") -> list[str]:
    """List the fields of a section, and of those below it, that have this name: paths as they are written.

    What lists hold is left out: which of their entries is meant is not known.
    """
    found: list[str] = []
    for name, info in section.model_fields.items():
        path = f"{above}{info.alias or name}"
        if (info.alias or name) == key:
            found.append(path)
        for member in members(info.annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                found += fields_named(member, key, f"{path}.")
    return list(dict.fromkeys(found))


def _show(value: object) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _walk(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[tuple[str, ...], type[BaseModel] | None]:
    """The path as the user writes it (union tags left out), and the section that holds its last key."""
    path: list[str] = []
    current: Any = model
    parent: type[BaseModel] | None = None
    for part in loc:
        if part == "[key]":  # pydantic's word for the key of a mapping, after the key itself
            continue
        options = members(current)
        tagged = [member for member in options if _tag(member) == part]
        if tagged and len(options) > 1:
            current = tagged[0]
            continue
        path.append(str(part))
        parent = next((m for m in options if isinstance(m, type) and issubclass(m, BaseModel)), None)
        current = field_type(parent, part) if parent else _element(options)
    return tuple(path), parent


def field_type(section: type[BaseModel] | None, key: int | str) -> Any:
    """Look up the annotation of a field, by name or alias; None if there is none."""
    if section is None:
        return None
    return next((info.annotation for name, info in section.model_fields.items() if key in (name, info.alias)), None)


def _element(options: Sequence[Any]) -> Any:
    """The annotation of what a tuple or mapping holds; None for anything else."""
    inner = [[arg for arg in get_args(option) if arg is not Ellipsis] for option in options]
    return next((args[-1] for args in inner if args), None)


def members(annotation: Any) -> list[Any]:
    """List the types that an annotation joins, without None and without what it asks of them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [m for arg in get_args(annotation) if arg is not type(None) for m in members(arg)]
    return [annotation]


def _tag(member: Any) -> str | None:
    if isinstance(member, type) and issubclass(member, BaseModel) and "type" in member.model_fields:
        values = get_args(member.model_fields["type"].annotation)
        return str(values[0]) if values else None
    return None
