"""Model directories in Hugging Face format: finding them, what they hold, and the files beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

INDEX = "model.safetensors.index.json"
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


def locate(path: str) -> Path:
    """The directory of a model given as a directory or as a cached hub id. Raises FileNotFoundError."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(f"model.path = {path}: neither a directory nor a cached hub id") from error


def tensor_names(directory: Path) -> set[str]:
    """Names of all tensors in the directory's safetensors files."""
    names: set[str] = set()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names.update(handle.keys())
    return names


def copy_companions(source: Path, target: Path, dtype: str, quantization: dict[str, Any] | None) -> None:
    """Copy config, tokenizer and generation settings; the config then names dtype and quantisation. Raises OSError."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.name not in (INDEX, "MANIFEST.json"):
                shutil.copyfile(file, target / file.name)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
