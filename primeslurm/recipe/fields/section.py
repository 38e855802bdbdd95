"""The base class of all sections of a recipe and a site file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import pairwise
from textwrap import dedent
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator


class Section(BaseModel):
    """A frozen section that refuses unknown keys. Attribute docstrings are the help texts of the schema."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _normalize_booleans(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        # YAML reads `yes` and `on` as true, which pydantic would take for the number 1. It refuses the text "true".
        return {
            key: str(value).lower() if isinstance(value, bool) and _is_number(field_type(cls, key)) else value
            for key, value in data.items()
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in descriptions(cls).items():
            properties[cls.model_fields[name].alias or name]["description"] = text
        return schema


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Map each field, inherited fields included, to the docstring below it."""
    # Pydantic's `use_attribute_docstrings` would parse the source of every section at import. Only schemas and
    # reference pages need the texts.
    import ast

    # A field `type` with a single value needs no docstring of its own.
    texts = {
        name: f"Write `type: {get_args(info.annotation)[0]}` to choose this section."
        for name, info in section.model_fields.items()
        if name == "type" and get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1
    }
    for base in reversed(section.__mro__):
        if not issubclass(base, Section) or base is Section:
            continue
        (definition,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    if name in section.model_fields:
                        texts[name] = inspect.cleandoc(words)
    return texts


def field_type(section: type[BaseModel] | None, key: int | str) -> Any:
    """Return the annotation of a field, by name or alias; None if the section has no such field."""
    if section is None:
        return None
    return next((info.annotation for name, info in section.model_fields.items() if key in (name, info.alias)), None)


def members(annotation: Any) -> list[Any]:
    """List the types of a union, without None and without the metadata of `Annotated`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [m for arg in get_args(annotation) if arg is not type(None) for m in members(arg)]
    return [annotation]


def _is_number(annotation: object) -> bool:
    kinds = members(annotation)
    return bool not in kinds and any(kind in (int, float) for kind in kinds)
