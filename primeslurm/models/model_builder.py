"""From a Hugging Face config to a torchtitan model: one module per family, found by `model_type`.

A family's module is imported when a model needs it. It may register what transformers does not know of the family.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from primeslurm.models import family_of, model_types

Builder = Callable[[Any, int, str], ModelSpec]


def builder(model_type: str) -> Builder | None:
    """The function `spec` of the module that builds a model type; None if only transformers has code for it."""
    family = family_of(model_type)
    if family is None:
        return None
    build: Builder = import_module(family.builder or f"{__package__}.{family.name}.model").spec
    return build


def is_generic(impl: str, hf_config: Any) -> bool:
    """Whether `model.impl` means the code of transformers for this config."""
    return impl == "hf" or (impl == "auto" and family_of(hf_config.model_type) is None)


def spec(hf_config: Any, seq_len: int, attention: str) -> ModelSpec:
    """Make the torchtitan spec of a Hugging Face config.

    Args:
        hf_config: a transformers config.
        seq_len: longest sequence, which sizes the RoPE tables.
        attention: "flex" or "varlen".

    Raises:
        ValueError: the family, or a feature that the config asks for, is not supported.
    """
    build = builder(hf_config.model_type)
    if build is None:
        known = ", ".join(model_types())
        raise ValueError(f"model type {hf_config.model_type} is not supported (supported: {known})")
    return build(hf_config, seq_len, attention)
