"""Step time and memory of adapters that share passes: `python -m benchmarks tenants MODEL [--device cuda] [--write]`.

The same sequences are those of 1, 4 or 16 clients of the Tinker service. Each case computes their gradients and
optimizer steps twice: in one shared pass, and one client after another. All cases take turns in every round, and the
result is the median of the rounds: CPU seconds, or on a GPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.machine import machine, versions

RESULT = Path(__file__).resolve().parent / "results" / "tenants.json"
COUNTS = (1, 4, 16)


def measure(model: Path, rank: int, sequences: int, length: int, rounds: int) -> dict[str, Any]:
    """Time all cases. `sequences` is a multiple of 16."""
    import numpy as np
    import torch

    from primeslurm.tinker.backbone import Backbone, Pass
    from primeslurm.tinker.requests import AdamParams, Datum, LoraConfig
    from primeslurm.trainer.distributed.world import alone

    backbone = Backbone(str(model), rank, alone())
    cuda = backbone.policy.device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)  # threads that wait for each other use CPU seconds too
    rng = np.random.default_rng(0)

    def datum() -> Datum:
        tokens = rng.integers(100, backbone.limits.vocabulary, length + 1)
        weights = np.ones(length, np.float32)
        return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:], "weights": weights})

    data = [datum() for _ in range(sequences)]
    adapters = [backbone.adapter(LoraConfig(rank=rank, seed=seed)) for seed in range(max(COUNTS))]

    def seconds(work: Callable[[], object]) -> float:
        clock = time.perf_counter if cuda else time.process_time
        began = clock()
        work()
        if cuda:
            torch.cuda.synchronize()
        return clock() - began

    def step(count: int, together: bool) -> tuple[float, float]:
        """Return seconds of the passes and of the optimizer steps."""
        share = sequences // count
        passes = [
            Pass(adapter, data[share * index : share * (index + 1)], "cross_entropy", {}, backward=True)
            for index, adapter in enumerate(adapters[:count])
        ]
        groups = [passes] if together else [[each] for each in passes]
        spent = seconds(lambda: [backbone.score(group) for group in groups])
        return spent, seconds(lambda: [each.adapter.step(AdamParams()) for each in passes])

    cases = [(count, together) for count in COUNTS for together in (True, False)]
    times: dict[tuple[int, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            spent = step(*case)
            if number:  # the first round warms up
                times[case].append(spent)
    parameters = sum(tensor.nbytes for tensor in adapters[0].parameters.values())
    moments = sum(t.nbytes for t in adapters[0].optimizer.state_dict().values() if isinstance(t, torch.Tensor))
    result: dict[str, Any] = {}
    whole = {case: median(map(sum, spent)) for case, spent in times.items()}
    for count in COUNTS:
        result[str(count)] = {
            "adapters": count,
            "shared_s": round(whole[count, True], 3),
            "of_which_optimizer_s": round(median(optimizer for _, optimizer in times[count, True]), 3),
            "shared_relative_to_one": round(whole[count, True] / whole[1, True], 3),
            "one_after_another_s": round(whole[count, False], 3),
            "one_after_another_relative_to_one": round(whole[count, False] / whole[1, True], 3),
            "parameters_and_moments_bytes": count * (parameters + moments),
        }
    return {"cases": result, "bytes_per_adapter": {"parameters": parameters, "moments": moments}}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tenants", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=16, help="a multiple of 16")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write tenants.json, or tenants_cuda.json")
    options = parser.parse_args(words)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: torch finds no GPU on this machine. Use --device cpu, or another machine.")
    measured = measure(options.model, options.rank, options.sequences, options.length, options.rounds)
    result = {
        "command": " ".join(["python -m benchmarks tenants", *words]),
        "machine": machine(),
        "versions": versions("torch"),
        "rank": options.rank,
        "tokens": options.sequences * options.length,
        **measured,
    }
    print(json.dumps(result, indent=2))
    if options.write:
        name = RESULT if options.device == "cpu" else RESULT.with_stem("tenants_cuda")
        name.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
