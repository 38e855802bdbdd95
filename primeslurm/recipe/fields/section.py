"""The base of every recipe section."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import pairwise
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator

from primeslurm.recipe.reading.explain import field_type, members


class Section(BaseModel):
    """A recipe section: frozen, unknown keys are errors, attribute docstrings become the help text of the schema."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_not_one(cls, data: object) -> object:
        """YAML reads `yes` and `on` as true, which would pass for the number 1: as text it is refused."""
        if not isinstance(data, Mapping):
            return data
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
    """Map each field to the docstring below it, inherited fields included.

    A field `type` that allows one value needs no docstring: all of them mean the same.
    """
    # Pydantic's `use_attribute_docstrings` would parse the source of every section at import. Only schemas and
    # reference pages need the texts.
    import ast

    found = {
        name: f"Write `type: {get_args(info.annotation)[0]}` to choose this section."
        for name, info in section.model_fields.items()
        if name == "type" and get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1
    }
    for each in reversed(section.__mro__):
        if not issubclass(each, Section) or each is Section:
            continue
        (definition,) = ast.parse(dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = inspect.cleandoc(words)
    return found


def _is_number(annotation: object) -> bool:
    kinds = members(annotation)
    return bool not in kinds and any(kind in (int, float) for kind in kinds)
