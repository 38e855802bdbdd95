"""`training_speed` over shapes, lengths and layouts, as many as the GPUs allow, with one JSON file each.

    timeout 590 python -m benchmarks training_sweep OUT 4 whole_16k whole_16k_torchtitan --patience-s 290
    timeout 590 python -m benchmarks training_sweep OUT 4 part_65k part_65k_torchtitan --patience-s 290
    python -m benchmarks training_sweep OUT 1 compiled_glm5 compiled_glm5_fp8_replay --at-once 2
    python -m benchmarks training_sweep OUT GPUS

A measurement that fails or takes too long leaves its log and no JSON. A few layers at full width represent the whole
model, and the vocabulary shrinks with them: 1/6 of Qwen3's, 1/40 of GLM-5's. Four GPUs also hold the whole
Qwen3-30B-A3B (`whole_...`, by name only) or, with 80 GB each, 20 of its 48 layers (`part_...`), with 16,384 tokens on
each GPU, which are a row or a quarter of one. With AdamW these fill the memory, so torchtitan's step is timed in a
separate process of the same call. `compiled_...`, by name only, compares compiled and eager layers for each family and
mode. Compilers take most of that time, so `--at-once` runs several, each on its own GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

PATIENCE_S = 240
SHOWN = ("ours", "torchtitan", "eager", "speed_ratio", "recompiles")
# GPUs that hold all of Qwen3-30B-A3B with gradients and AdamW's float32 moments: 122 GB each (20 layers: 52 GB).
DEEP_GPUS = 4


def cells(gpus: int) -> dict[str, list[str]]:
    """Return the options of each measurement, by name."""
    qwen3 = ["--shape", "qwen3_30b_a3b", "--vocab", "25600", "--layers", f"{4 * gpus}", "--ep", f"{gpus}"]
    dense = ["--shape", "qwen3_4b", "--vocab", "25600", "--layers", "12" if gpus < 2 else "24"]
    layers = ["--layers", f"{2 if gpus < 4 else gpus}", "--experts", f"{16 * gpus}", "--vocab", "4096"]
    glm5 = ["--shape", "glm5", *layers, "--optimizer", "sgd", "--ep", f"{gpus}"]
    split = ["--cp", f"{gpus}"]
    deepep = {"qwen3_30b_a3b_deepep": [*qwen3, "--seq", "16384", "--ep-backend", "deepep"]} if gpus > 1 else {}
    return {
        "qwen3_30b_a3b": [*qwen3, "--seq", "16384", "--against", "torchtitan"],
        "qwen3_4b": [*dense, "--seq", "16384", "--against", "torchtitan"],
        "qwen3_30b_a3b_fp8": [*qwen3, "--seq", "16384", "--fp8"],
        "glm5_16k": [*glm5, "--seq", "16384"],
        "glm5_16k_fp8": [*glm5, "--seq", "16384", "--fp8"],
        "glm5_65k": [*glm5, "--seq", "65536", *split],
        "glm5_131k": [*glm5, "--seq", "131072", *split],
        "qwen3_30b_a3b_65k": [*qwen3, "--seq", "65536", *split],
        **deepep,
    }


def deep(gpus: int) -> dict[str, list[str]]:
    """Return the options of each measurement of Qwen3-30B-A3B, whole or in part. DeepEP's steps cannot be compiled."""
    model = ["--shape", "qwen3_30b_a3b", "--ep", f"{gpus}", "--lm-head-chunk", "2048", "--steps", "6"]
    depths = {"whole": ["--layers", "48"], "part": ["--layers", "20", "--vocab", "25600"]}
    lengths = {"16k": ["--seq", "16384"], "65k": ["--seq", f"{16384 * gpus}", "--cp", f"{gpus}"]}
    variants = {
        "": ["--compile"],
        "_torchtitan": ["--compile", "--instead", "torchtitan"],
        # If the states do not fit: our step, with AdamW's states in host memory.
        "_offload": ["--compile", "--optimizer-state-offload"],
        "_eager": [],
        "_deepep": ["--ep-backend", "deepep"],
    }
    return {
        f"{depth}_{length}{variant}": [*model, *layers, *row, *options]
        for depth, layers in depths.items()
        for length, row in lengths.items()
        for variant, options in variants.items()
    }


def compiled(gpus: int) -> dict[str, list[str]]:
    """Return the options of comparisons of compiled and eager layers, with documents of varying lengths."""
    mixture = {  # experts that keep a layer's states small
        "qwen3_30b_a3b": [],
        "glm4_5_air": ["--experts", "32"],
        "deepseek_v3": ["--experts", "16"],
        "gpt_oss_120b": ["--experts", "32"],
        "minimax_m2": ["--experts", "64"],
        "glm5": ["--experts", "16"],
        "qwen3_5": ["--layers", "4", "--experts", "64"],
        "nemotron_h": ["--layers", "7", "--experts", "64"],
    }
    rows = ["--vocab", "8192", "--optimizer", "sgd", "--seq", f"{16384 * gpus}", "--documents", "24", "--steps", "6"]
    common = [*rows, "--compile", "--against", "eager", "--cp", f"{gpus}"]
    modes = {"": [], "_fp8_replay": ["--fp8", "--router-replay"], "_lora_replay": ["--lora", "16", "--router-replay"]}
    dense_modes = {"": [], "_fp8": ["--fp8"], "_lora": ["--lora", "16"]}
    return {
        f"compiled_{shape}{mode}": ["--shape", shape, *common, *size, *options]
        for shape, size in (mixture | {name: ["--layers", "4"] for name in ("qwen3_4b", "llama3_8b")}).items()
        for mode, options in (modes if shape in mixture else dense_modes).items()
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks training_sweep", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("gpus", type=int, choices=[1, 2, 4])
    parser.add_argument("cells", nargs="*", metavar="CELL", help="default: all that are neither deep nor compiled_...")
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="for each measurement")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="so many measurements, each on other GPUs")
    options = parser.parse_args(words)
    known = cells(options.gpus) | compiled(options.gpus)
    known |= deep(options.gpus) if options.gpus >= DEEP_GPUS else {}
    if unknown := set(options.cells) - known.keys():
        parser.error(f"{options.gpus} GPUs have no cell {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    places: SimpleQueue[str] = SimpleQueue()
    running: set[subprocess.Popen[bytes]] = set()
    needed = options.gpus * options.at_once
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(needed)))).split(",")
    for first in range(0, needed, options.gpus):
        places.put(",".join(mine[first : first + options.gpus]))

    def cell(name: str) -> None:
        place = places.get()
        settings = [*known[name], "--ranks", str(options.gpus)]
        try:
            print(f"{name}: {measure(options.out / name, settings, options.patience_s, place, running)}", flush=True)
        finally:
            places.put(place)  # otherwise the next measurement would wait forever

    with ThreadPoolExecutor(options.at_once) as pool:
        try:
            list(pool.map(cell, options.cells or cells(options.gpus)))
        except BaseException:  # the whole sweep is being ended
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                os.killpg(process.pid, signal.SIGTERM)
            raise


def measure(
    stem: Path, settings: list[str], patience_s: float, gpus: str, running: set[subprocess.Popen[bytes]]
) -> str:
    """Write STEM.json and STEM.log with a process on these GPUs, and return the line to print."""
    result, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks", "training_speed", *settings, "--out", str(result)]
    with log.open("w") as file:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=env)
        running.add(process)
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # including the ranks
            code = process.wait()
        running.discard(process)
    if code:
        return f"failed, see {log}"
    found = json.loads(result.read_text())
    return json.dumps({name: found[name] for name in SHOWN if name in found})
