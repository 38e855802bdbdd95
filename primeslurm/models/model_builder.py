"""Torchtitan model specs from Hugging Face configs, built by the module `model` of each family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models.registry import family_of, model_types

Builder = Callable[[Any, int, str], ModelSpec]


def builder(model_type: str) -> Builder | None:
    """Return the function `spec` of a family's model module, or None if no family has this model type.

    Importing the module may register a config that transformers lacks.
    """
    family = family_of(model_type)
    if family is None or family.builder is None:
        return None
    build: Builder = import_module(family.builder).spec
    return build


def is_generic(impl: str, hf_config: Any) -> bool:
    """Return whether `model.impl` selects the code of transformers for this config."""
    return impl == "hf" or (impl == "auto" and family_of(hf_config.model_type) is None)


def spec(hf_config: Any, seq_len: int, attention: str) -> ModelSpec:
    """Return the torchtitan spec of a config of transformers, for attention "flex" or "varlen".

    `seq_len`, the longest sequence [tokens], sizes the RoPE tables. Raise ValueError if the family, or a feature that
    the config asks for, is not supported.
    """
    build = builder(hf_config.model_type)
    if build is None:
        supported = ", ".join(model_types())
        raise ValueError(f"model type {hf_config.model_type} is not supported (supported: {supported})")
    return build(hf_config, seq_len, attention)
