"""Predicted step times compared with every recorded step of `benchmarks training_speed` on GPUs.

    python -m benchmarks step_times --write

The newest record of a configuration counts. Records with the key `code` ran older code of the trainer: they are shown,
but neither counted nor fitted. The constants of the model were fitted to the counted steps on one and two GPUs, so that
the sum of the fourth powers of log(predicted / recorded) is smallest. Steps on four GPUs were held out of the fit, but
seen when the parts of the model were chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from primeslurm.models.hf_config import shape_of
from primeslurm.plan.estimates import step_time as model
from primeslurm.plan.gpus import GPUS

RESULTS = Path(__file__).resolve().parent / "results"
RESULT = RESULTS / "step_times.json"
# Options of `training_speed` by which steps differ
KEYS = (
    "layers", "experts", "vocab", "seq", "documents",
    "rows", "ranks", "dp_replicate", "ep", "ep_backend",
    "cp", "cp_style", "checkpointing", "reduce_gradients", "optimizer",
    "optimizer_offload", "optimizer_state_offload", "activation_offload", "fp8", "router_replay",
    "lora", "compile",
)  # fmt: skip


def records() -> list[dict[str, Any]]:
    """Return the newest record of each configuration, and those of older code."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        for found in (*_steps(json.loads(path.read_bytes())), *(_cases() if path.stem == "compiled_h200" else ())):
            record = _completed(found) | {"file": path.stem}
            for compiled, name in ((record["compile"], "ours"), (False, "eager")):
                if name in record:
                    one = record | {"compile": compiled, "seconds": record[name]["seconds"]}
                    newest[tuple(one[key] for key in ("shape", "gpu", *KEYS))] = one
    return list(newest.values())


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for each in value:
            yield from _steps(each)
    elif isinstance(value, Mapping) and "ours" in value and "shape" in value:
        if value.get("gpu") and not value.get("plain_recurrence"):
            yield dict(value)
    elif isinstance(value, Mapping):
        yield from _steps(list(value.values()))


def _cases() -> Iterator[dict[str, Any]]:
    """Yield the steps of compiled_h200.json, whose keys are options of `training_speed`."""
    from benchmarks.training_speed import arguments

    for words, case in json.loads((RESULTS / "compiled_h200.json").read_bytes())["cases"].items():
        shape = "--shape qwen3_30b_a3b --vocab 8192 " + words
        if words == "glm5":
            shape = "--shape glm5 --experts 16 --vocab 4096"
        options = vars(arguments(f"{shape} --layers 2 --optimizer sgd --seq 16384 --compile".split()))
        times = {"ours": {"seconds": case["compiled_s"]}, "eager": {"seconds": case["eager_s"]}}
        yield options | times | {"gpu": "NVIDIA H200"}


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with values for options that are newer than it."""
    from benchmarks.training_speed import arguments

    return vars(arguments(["--shape", record["shape"]])) | record


def predicted(record: Mapping[str, Any]) -> model.StepTime:
    """Predict the step of a record."""
    from benchmarks.training_models import SHAPES
    from benchmarks.training_speed import document_lengths, make_recipe

    config = SHAPES[record["shape"]].build(record["layers"], record["experts"], record["vocab"])
    lengths = document_lengths(record["seq"], record["rows"], record["documents"])
    return model.step_time(
        make_recipe(argparse.Namespace(**record), on_cpu=False),
        shape_of(config.to_dict()),
        GPUS["h200" if "H200" in record["gpu"] else "h100"],
        nodes=1,
        gpus=record["ranks"],
        gbps=400,
        tokens=record["rows"] * record["seq"],
        length=sum(length**2 for length in lengths) / sum(lengths),
    )


def compared() -> list[dict[str, Any]]:
    """Return what identifies each record, its predicted step, and the error; the largest number of GPUs last."""
    rows = []
    for record in sorted(records(), key=lambda record: record["ranks"]):
        seconds, recorded = predicted(record).shortest, record["seconds"]
        use = "older code" if record.get("code") else "held out" if record["ranks"] > 2 else "fitted"
        gpu = f"{record['ranks']} {record['gpu'].removeprefix('NVIDIA ').split()[0]}"
        options = {key: record[key] for key in ("file", "shape", *KEYS) if record[key]}
        rows.append(options | {"gpus": gpu, "use": use})
        rows[-1] |= {"predicted_s": round(seconds, 4), "recorded_s": recorded}
        rows[-1] |= {"error_percent": round(100 * (seconds / recorded - 1), 1)}
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return numbers about the errors of rows [%]."""
    errors = [row["error_percent"] for row in rows]
    return {
        "steps": len(errors),
        "worst": max(map(abs, errors)),
        "mean": round(statistics.mean(errors), 1),
        "too_long": sum(error > 0 for error in errors),
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks step_times", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    rows = compared()
    counted = [row for row in rows if row["use"] != "older code"]
    sets = {
        "all": counted,
        "held_out": [row for row in counted if row["use"] == "held out"],
        "ep_or_cp": [row for row in counted if row["ep"] > 1 or row["cp"] > 1],
        "fp8": [row for row in counted if row.get("fp8")],
        "compiled": [row for row in counted if row.get("compile")],
    }
    result = {
        "command": "python -m benchmarks step_times --write",
        "machine": "records of H100 and H200",
        "error_percent": {name: summary(each) for name, each in sets.items()},
        "rows": rows,
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.write:
        RESULT.write_text(text)
