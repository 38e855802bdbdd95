"""The demo's run on real GPUs, without Slurm: a warm start on one, then RL with FSDP2, prefill and decode on one each.

Needs 2 + TRAINER_GPUS GPUs; options of the RL run, such as `--set inference.expert_parallel=true`, may ask for more.
Results: OUT/*/summary.json, OUT/*/attempts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = Path("recipes")
RUNS = Path("runs")


def main(words: list[str]) -> None:
    """Run both, keep what they left behind, and end with the exit code of the second."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_run", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("trainer_gpus", type=int, nargs="?", default=2)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the RL run")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as work:
        model = warm_start(Path(work), options.out)
        code = reinforce(model, options.trainer_gpus, options.options, options.out)
    with (options.out / "gpus.csv").open("w") as file:
        subprocess.run(["nvidia-smi", "--query-gpu=name,memory.used", "--format=csv"], stdout=file, check=False)
    sys.exit(code)


def warm_start(work: Path, out: Path) -> Path:
    """Fine-tune a random model on demonstrations; its directory, or the random one's if that failed."""
    name, random, chats = f"gpu-sft-{os.getpid()}", work / "random", work / "demonstrations.jsonl"
    python("-W", "ignore", "-m", "primeslurm.trainer.tiny", "model", str(random))
    python("-W", "ignore", "-m", "primeslurm.trainer.tiny", "demonstrations", str(chats))
    paths = {"model.path": str(random), "sft.data.path": str(chats)}
    submit("reverse_text_sft.yaml", name, 150, {"model.dtype": "bfloat16", **paths})
    keep(name, out / "sft")
    for log in sorted((RUNS / name / "attempts" / "1" / "logs" / "trainer").glob("*.log")):
        _, found, trace = log.read_text(errors="replace").partition("Traceback")
        if found:
            print(found + trace[:4000], file=sys.stderr)
    return max((RUNS / name / "weights").glob("v*"), default=random)


def reinforce(model: Path, trainer_gpus: int, options: list[str], out: Path) -> int:
    """RL from this model."""
    name = f"gpu-rl-{os.getpid()}"
    settings = {
        "model.path": str(model),
        "model.dtype": "bfloat16",
        "inference.enforce_eager": "true",
        "inference.gpu_memory_utilization": "0.3",
        "deployment.train.gpus_per_node": str(trainer_gpus),
    }
    code = submit("reverse_text.yaml", name, 420, settings, *options)
    if code:
        python("-m", "primeslurm", "cancel", str(RUNS / name))
    keep(name, out / "rl")
    return code


def submit(recipe: str, name: str, timeout_s: float, settings: dict[str, str], *options: str) -> int:
    """Submit a run to this machine and wait for it; the exit code."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    local = ["submit", str(RECIPES / recipe), "--local", "--name", name, "--wait", "--set", "slurm.max_attempts=1"]
    return python("-m", "primeslurm", *local, *words, *options, timeout_s=timeout_s)


def keep(name: str, directory: Path) -> None:
    """Copy what a run left behind, with its summary."""
    directory.mkdir(parents=True, exist_ok=True)
    run = RUNS / name
    if (run / "attempts").is_dir():
        shutil.copytree(run / "attempts", directory / "attempts", dirs_exist_ok=True)
    if (run / "metrics.jsonl").is_file():
        shutil.copy(run / "metrics.jsonl", directory)
    argv = [sys.executable, "-m", "primeslurm", "summary", str(run), "--json"]
    summary = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False).stdout
    (directory / "summary.json").write_text(summary)
    print(summary, end="", flush=True)


def python(*words: str, timeout_s: float = 600) -> int:
    """Run Python; the exit code. What does not end in time is asked to, as by `timeout`, and counts as failed."""
    process = subprocess.Popen([sys.executable, *words])
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return 124
