"""Translate errors of pydantic into messages: the field, its value, the reason, and the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel

from primeslurm.base.errors import Violation
from primeslurm.recipe.fields.section import field_type, members
from primeslurm.recipe.fields.strings import shown
from primeslurm.recipe.fields.suggestions import nearest, suggestion

if TYPE_CHECKING:
    from primeslurm.recipe.reading.aliases import Alias

_MUST_BE_LIST = "must be a list"
# Reasons by type of error, where pydantic's own messages use words of Python.
_REASONS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type", "mapping_type"), "must be a section of keys and values"
    ),
    **dict.fromkeys(("tuple_type", "list_type"), _MUST_BE_LIST),
    "finite_number": "must be a finite number",
    "string_type": "must be text",
}
# By type of error: the key of the bound in the error's context, the reason, and the distance from the bound to the
# nearest valid whole number.
_BOUNDS = {
    "greater_than": ("gt", "must be greater than {}", 1),
    "greater_than_equal": ("ge", "must be at least {}", 0),
    "less_than": ("lt", "must be less than {}", -1),
    "less_than_equal": ("le", "must be at most {}", 0),
}
# A key that exists in more sections than this says too little about which one was meant.
_MAX_SUGGESTIONS = 3
# Above this similarity, a key is a misspelt field and not a name from another tool.
_TYPO_CUTOFF = 0.8

RECIPE, SITE_FILE = "recipe", "site file"


@dataclass(frozen=True)
class OtherFile:
    """The site file of a recipe, or the recipe of a site file."""

    name: str
    """`RECIPE` or `SITE_FILE`."""
    model: type[BaseModel]


@dataclass(frozen=True)
class InputFault:
    """A violation, and the part of the input that it concerns."""

    violation: Violation
    path: tuple[str, ...]
    """Keys and list indices from the top of the file."""
    meant: str = ""
    """For an unknown key: dotted path of the field that was probably meant; empty if there is none."""


def faults(model: type[BaseModel], details: Any, source: str, other: OtherFile | None = None) -> list[InputFault]:
    """Translate one error of pydantic.

    Args:
        details: one entry of the list that `ValidationError.errors()` returns.
        source: name of the file, for messages about missing fields.

    Returns:
        One fault, or several for an unknown section that holds keys of other tools.
    """
    # Processes of a run import this module and never read the table of aliases.
    from primeslurm.recipe.reading.aliases import find_value

    path, parent = _walk(model, details["loc"])
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    field = ".".join(path)
    if kind == "extra_forbidden":
        return _unknown_key(model, parent, path, value, other)
    if kind == "invalid_key":
        # YAML reads the unquoted keys `on` and `yes` as true.
        path = (*path[:-1], str(value))
        return [InputFault(Violation(".".join(path), "", "a key must be text", "write it in quotes"), path)]
    if kind == "missing":
        return [InputFault(Violation(field, "", f"is required but missing in {source}"), path)]
    if kind == "union_tag_not_found":
        tags = [tag for member in members(field_type(parent, details["loc"][-1])) if (tag := _tag(member))]
        missing = Violation(f"{field}.type", "", f"is required but missing in {source}", suggestion("", tags))
        return [InputFault(missing, (*path, "type"))]
    if kind in {"literal_error", "union_tag_invalid"}:
        # Pydantic gives the choices only as text: "'a', 'b' or 'c'".
        expected = str(context.get("expected") or context.get("expected_tags", ""))
        valid = [part.strip(" '\"") for part in expected.replace(" or ", ", ").split(",")]
        path, given = (path, value) if kind == "literal_error" else ((*path, "type"), value["type"])
        field = ".".join(path)
        alias = find_value(field, str(given))
        fix = alias.advice if alias else suggestion(str(given), valid)
        return [InputFault(Violation(field, shown(given), "is not a valid choice", fix), path)]
    return [InputFault(Violation(field, shown(value), *_reason_and_fix(kind, context, details["msg"], value)), path)]


def _unknown_key(
    model: type[BaseModel],
    parent: type[BaseModel] | None,
    path: tuple[str, ...],
    value: object,
    other: OtherFile | None,
) -> list[InputFault]:
    """Explain an unknown key by names of other tools, by fields of other sections, or by spelling."""
    from primeslurm.recipe.reading.aliases import find_alias

    names = [info.alias or name for name, info in parent.model_fields.items()] if parent else []
    is_typo = bool(difflib.get_close_matches(path[-1], names, n=1, cutoff=_TYPO_CUTOFF))
    if other and not path[1:] and _belongs_in(other.model, path[0], value):
        violation = Violation(path[0], "", f"belongs in the {other.name}", f"move it to the {other.name}")
        return [InputFault(violation, path)]
    if isinstance(value, Mapping) and value and not is_typo:
        # The section may be that of another tool, so its keys are explained one by one.
        leaves = [(leaf, item, find_alias(".".join(leaf))) for leaf, item in _leaves(value, path)]
        if explained := [_alias_fault(other, leaf, item, alias) for leaf, item, alias in leaves if alias]:
            unexplained = [leaf for leaf, _, alias in leaves if not alias]
            section = find_alias(".".join(path))
            fix = section.advice if section else ""
            return [*explained, _unknown_section(path, unexplained, fix)] if unexplained else explained
    same_name = fields_named(model, path[-1])
    # A misspelt field of the same section is more likely than a field of another section.
    is_elsewhere = 0 < len(same_name) <= _MAX_SUGGESTIONS and not (is_typo and path[1:])
    if alias := find_alias(".".join(path), min_parts=2 if is_elsewhere or is_typo else 1):
        return [_alias_fault(other, path, value, alias)]
    meant = ""
    if is_elsewhere:
        fix, meant = f"did you mean {' or '.join(same_name)}?", same_name[0] if len(same_name) == 1 else ""
    elif near := nearest(path[-1], names):
        fix, meant = f"did you mean {near}?", ".".join((*path[:-1], near))
    else:
        fix = suggestion(path[-1], names)
    if isinstance(value, Mapping) and value:
        return [_unknown_section(path, [leaf for leaf, _ in _leaves(value, path)], fix, meant)]
    return [InputFault(Violation(".".join(path), shown(value), "no such key", fix), path, meant)]


def _unknown_section(path: tuple[str, ...], keys: Sequence[tuple[str, ...]], fix: str, meant: str = "") -> InputFault:
    above = f" in {'.'.join(path[:-1])}" if path[1:] else ""
    fields = ", ".join(".".join(key) for key in keys[:_MAX_SUGGESTIONS])
    fields += f" and {len(keys) - _MAX_SUGGESTIONS} more" if len(keys) > _MAX_SUGGESTIONS else ""
    return InputFault(Violation(fields, "", f"there is no section {path[-1]}{above}", fix), path, meant)


def _belongs_in(model: type[BaseModel], key: str, value: object) -> bool:
    """Return whether a key and its value fit another file.

    A single value does not fit a section: `nodes: 4` comes from another tool, although site files have `nodes`.
    """
    kinds = [get_origin(kind) or kind for kind in members(field_type(model, key)) if kind is not None]
    are_sections = all(isinstance(kind, type) and issubclass(kind, Mapping | BaseModel) for kind in kinds)
    return bool(kinds) and not (isinstance(value, str | int | float) and are_sections)


def _alias_fault(other: OtherFile | None, path: tuple[str, ...], value: object, alias: Alias) -> InputFault:
    given = "" if isinstance(value, Mapping) else shown(value)
    is_in_other_file = alias.of_site != (other is not None and other.name == RECIPE)
    meant = "" if is_in_other_file or "[]" in alias.field else alias.field
    advice = f"in the recipe, {alias.advice}" if is_in_other_file and not alias.of_site else alias.advice
    return InputFault(Violation(".".join(path), given, "no such key", advice), path, meant)


def _leaves(value: Mapping[Any, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """List the values in nested sections with their paths."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, (*above, str(key)))
        else:
            yield (*above, str(key)), item


def _reason_and_fix(kind: str, context: Mapping[str, Any], message: str, value: object) -> tuple[str, str]:
    if kind == "syntax":
        return message, context.get("fix", "")
    if kind in _BOUNDS:
        name, reason, step = _BOUNDS[kind]
        bound = f"{context[name]:g}" if isinstance(context[name], float) else context[name]
        # An open interval of real numbers has no nearest valid value.
        if step and not (isinstance(value, int) and isinstance(context[name], int)):
            return reason.format(bound), ""
        return reason.format(bound), f"nearest: {int(context[name]) + step if step else bound}"
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    if kind == "string_type" and is_scalar:
        return _REASONS[kind], f'nearest: "{value}"'
    if _REASONS.get(kind) == _MUST_BE_LIST and is_scalar:
        return _MUST_BE_LIST, f"nearest: [{value}]"
    why = message.removeprefix("Value error, ")
    return _REASONS.get(kind) or why[0].lower() + why[1:], ""


def fields_named(section: type[BaseModel], key: str, above: str = "") -> list[str]:
    """List the dotted paths of all fields with a name, in a section and in the sections below it.

    Entries of lists are left out, because the index of the entry that was meant is unknown.
    """
    paths: list[str] = []
    for name, info in section.model_fields.items():
        path = f"{above}{info.alias or name}"
        if (info.alias or name) == key:
            paths.append(path)
        for member in members(info.annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                paths += fields_named(member, key, f"{path}.")
    return list(dict.fromkeys(paths))


def _walk(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[tuple[str, ...], type[BaseModel] | None]:
    """Return the path as the user wrote it, without tags of unions, and the section that holds its last key."""
    path: list[str] = []
    current: Any = model
    parent: type[BaseModel] | None = None
    for part in loc:
        if part == "[key]":  # pydantic appends this to the path of a mapping's key
            continue
        options = members(current)
        # The location of a value in a discriminated union contains the tag, which is no key of the file.
        tagged = [member for member in options if _tag(member) == part]
        if tagged and len(options) > 1:
            current = tagged[0]
            continue
        path.append(str(part))
        parent = next((m for m in options if isinstance(m, type) and issubclass(m, BaseModel)), None)
        current = field_type(parent, part) if parent else _element(options)
    return tuple(path), parent


def _element(options: Sequence[Any]) -> Any:
    """Return the annotation of the elements of a tuple or the values of a mapping; None for anything else."""
    arguments = [[arg for arg in get_args(option) if arg is not Ellipsis] for option in options]
    return next((args[-1] for args in arguments if args), None)


def _tag(member: Any) -> str | None:
    """Return the value of `type` that selects this section of a union; None if it has no `type`."""
    if isinstance(member, type) and issubclass(member, BaseModel) and "type" in member.model_fields:
        values = get_args(member.model_fields["type"].annotation)
        return str(values[0]) if values else None
    return None
