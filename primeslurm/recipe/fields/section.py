"""The base class of all sections of a recipe and a site file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import pairwise
from textwrap import dedent
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator


class Section(BaseModel):
    """A frozen section that refuses unknown keys. Attribute docstrings are the help texts of the schema."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}
    """Deprecated names of fields, and their present names."""

    @model_validator(mode="before")
    @classmethod
    def _normalize_keys_and_booleans(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        # If both names are given, the old one stays, and pydantic refuses it as an unknown key.
        data = {new if (new := cls.renamed.get(key, key)) not in data else key: value for key, value in data.items()}
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


def deprecated_keys(model: type[BaseModel], data: object) -> list[tuple[str, str]]:
    """List the deprecated keys in the input of a model: dotted path as written, and the present name."""
    return list(dict.fromkeys(_deprecated_keys([model], data, "")))


def _deprecated_keys(kinds: list[Any], data: object, above: str) -> Iterator[tuple[str, str]]:
    if isinstance(data, list):
        elements = [kind for each in kinds if get_origin(each) is tuple for kind in members(get_args(each)[0])]
        for i, item in enumerate(data):
            yield from _deprecated_keys(elements, item, f"{above}{i}.")
    elif isinstance(data, Mapping):
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        for key, value in data.items():
            new_names = [section.renamed[key] for section in sections if key in section.renamed]
            if new_names:
                yield f"{above}{key}", new_names[0]
            below = [kind for section in sections for kind in members(field_type(section, key))]
            below += [kind for each in kinds if get_origin(each) is dict for kind in members(get_args(each)[1])]
            yield from _deprecated_keys(below, value, f"{above}{key}.")


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
