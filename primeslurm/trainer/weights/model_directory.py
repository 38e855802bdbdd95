"""Model directories in Hugging Face format: reading the config, and writing the files beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from primeslurm.base import files
from primeslurm.base.model_files import INDEX
from primeslurm.models import model_builder, model_types
from primeslurm.models.quantization import four_bit_format, is_block_fp8

_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


def load_config(directory: Path) -> Any:
    """Read the transformers config of a model directory. Raises ValueError for unsupported types and formats."""
    # Importing the family's module first registers configs that transformers lacks.
    model_builder.builder(json.loads(files.read_bytes(directory / "config.json")).get("model_type", ""))
    config = AutoConfig.from_pretrained(directory)
    stored = _quantization(config)
    if stored and not (is_block_fp8(stored) or _reads_four_bits(config.model_type, stored)):
        method = stored.get("quant_method", "an unknown format")
        raise ValueError(f"{directory}: weights stored in {method} are not supported; convert them to bfloat16 first")
    return config


def is_quantized(config: Any) -> bool:
    return bool(_quantization(config))


def _quantization(config: Any) -> Mapping[str, Any]:
    stored = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    return next((config for config in stored if config), {})


def _reads_four_bits(model_type: str, stored: Mapping[str, Any]) -> bool:
    code, family = four_bit_format(stored), model_types().get(model_type)
    return code is not None and family is not None and bool(getattr(family, f"{code}_checkpoint"))


def write_companions(
    source: Path,
    target: Path,
    index: Mapping[str, str],
    total_size: int,
    dtype: str,
    quantization: dict[str, Any] | None = None,
) -> None:
    """Write the files beside the weights: index, config with `dtype` and `quantization`, tokenizer. Raises OSError."""
    for pattern in _COMPANIONS:
        for file in files.listing(source, pattern):
            if file.name not in (INDEX, "MANIFEST.json"):
                shutil.copyfile(file, target / file.name)
    config: dict[str, Any] = json.loads(files.read_bytes(source / "config.json"))
    config.pop("torch_dtype", None)
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    config["dtype"] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    files.write_json(target / "config.json", config)
    document = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(index.items()))}
    files.write_json(target / INDEX, document)
