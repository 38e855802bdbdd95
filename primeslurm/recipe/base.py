"""The base of every recipe section."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, model_validator

from primeslurm.recipe.explain import field_type, members


class Section(BaseModel):
    """A recipe section: frozen, unknown keys are errors, attribute docstrings become the help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

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


def _is_number(annotation: object) -> bool:
    kinds = members(annotation)
    return bool not in kinds and any(kind in (int, float) for kind in kinds)
