"""Write the reference of recipe and site fields in Markdown, with one table per section."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from primeslurm.recipe.fields.section import descriptions


def markdown(model: type[BaseModel]) -> str:
    """Return the tables of a model and of all sections below it, breadth first."""
    lines: list[str] = []
    for section in _sections(model):
        lines += [f"## {section.__name__}", "", " ".join((section.__doc__ or "").split()), ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        meanings = descriptions(section)
        lines += [_row(info.alias or name, info, meanings.get(name, "")) for name, info in section.model_fields.items()]
        if renamed := getattr(section, "renamed", {}):
            names = ", ".join(f"`{old}` (now `{new}`)" for old, new in renamed.items())
            lines += ["", f"Deprecated names that still work: {names}."]
        lines.append("")
    return "\n".join(lines)


def _sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    sections = [model]
    for section in sections:  # the list grows in this loop
        for info in section.model_fields.values():
            sections += [below for below in _models(info.annotation) if below not in sections]
    return sections


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _row(name: str, info: FieldInfo, meaning: str) -> str:
    cells = [f"`{name}`", _type(info.annotation), _default(info), " ".join(meaning.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        kinds = [_type(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"map of {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "object": "any"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "required"
    if info.default in (None, (), {}):
        return ""
    if isinstance(info.default, BaseModel):
        return "its defaults"
    if isinstance(info.default, tuple):
        return ", ".join(f"`{value}`" for value in info.default)
    return f"`{str(info.default).lower() if isinstance(info.default, bool) else info.default}`"
