"""`training_speed` over shapes, lengths and layouts, as many as the GPUs allow; one JSON file each.

What fails, or takes longer than three minutes, leaves its log and no JSON. Few layers at full width stand for the whole
model, and the vocabulary shrinks with them: 1/6 of Qwen3's, 1/40 of GLM-5's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 180


def cells(gpus: int) -> dict[str, list[str]]:
    """Options of each measurement, by name."""
    qwen3 = ["--shape", "qwen3_30b_a3b", "--vocab", "25600", "--layers", f"{4 * gpus}", "--ep", f"{gpus}"]
    dense = ["--shape", "qwen3_4b", "--vocab", "25600", "--layers", "12" if gpus < 2 else "24"]
    layers = ["--layers", f"{2 if gpus < 4 else gpus}", "--experts", f"{16 * gpus}", "--vocab", "4096"]
    glm5 = ["--shape", "glm5", *layers, "--optimizer", "sgd", "--ep", f"{gpus}"]
    split = ["--cp", f"{gpus}"]
    return {
        "qwen3_30b_a3b": [*qwen3, "--seq", "16384", "--against", "torchtitan"],
        "qwen3_4b": [*dense, "--seq", "16384", "--against", "torchtitan"],
        "qwen3_30b_a3b_fp8": [*qwen3, "--seq", "16384", "--fp8"],
        "glm5_16k": [*glm5, "--seq", "16384"],
        "glm5_16k_fp8": [*glm5, "--seq", "16384", "--fp8"],
        "glm5_65k": [*glm5, "--seq", "65536", *split],
        "glm5_131k": [*glm5, "--seq", "131072", *split],
        "qwen3_30b_a3b_65k": [*qwen3, "--seq", "65536", *split],
    }


def main(words: list[str]) -> None:
    """Measure one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks training_sweep", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("gpus", type=int, choices=[1, 2, 4])
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, settings in cells(options.gpus).items():
        print(f"{name}: {measure(options.out / name, [*settings, '--ranks', str(options.gpus)])}", flush=True)


def measure(stem: Path, settings: list[str]) -> str:
    """Write STEM.json and STEM.log; what is said of it."""
    result, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks", "training_speed", *settings, "--out", str(result)]
    with log.open("w") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # the ranks as well
            code = process.wait()
    return f"failed, see {log}" if code else json.dumps(json.loads(result.read_text())["ours"])
