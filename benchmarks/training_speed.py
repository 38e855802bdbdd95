"""Seconds, tokens per second, MFU and memory of our training step, compared with torchtitan's.

    python -m benchmarks training_speed --shape tiny --against torchtitan
    python -m benchmarks training_speed --shape qwen3_30b_a3b --layers 8 --ranks 2 --ep 2 --seq 16384 --out R.json

Starts `--ranks` processes on this machine, on GPUs if it has any. Weights and tokens are random. Our step is that of
runs: `TrainStep.train` with the recipe's loss, from arrays in host memory to updated weights and metrics. It is
compared with torchtitan's `Trainer.train_step` (`--compile` applies to both), or with `--against eager` to itself
without compilation. Both models are in memory and take turns. If memory holds only one, a second call with `--instead
torchtitan` times the other. The ratio is that of medians: of elapsed time on GPUs, and of rank 0's CPU time on CPUs,
which other load affects less.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support import ranks

if TYPE_CHECKING:
    from primeslurm.models.shape import ModelShape

WARM_UP = 2
# Number of different batches, if rows have several documents.
BATCHES = 8

Step = Callable[[], None]


def arguments(words: list[str]) -> argparse.Namespace:
    from benchmarks.training_models import SHAPES

    parser = argparse.ArgumentParser(prog="python -m benchmarks training_speed", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, help="fewer than the model has; a token meets as many as ever")
    parser.add_argument("--vocab", type=int, help="words, so that few layers do not stand beside a whole head")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a row, which is one document, or")
    parser.add_argument("--documents", type=int, default=1, help="up to so many of other lengths, in each step others")
    parser.add_argument("--rows", type=int, default=1, help="of each data-parallel rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dp-replicate", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--ep-backend", choices=["torch", "deepep"], default="torch", help="of ours")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--cp-style", choices=["ulysses", "allgather"], default="ulysses")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="full")
    parser.add_argument("--reduce-gradients", choices=["micro_batch", "step"], default="micro_batch", help="of ours")
    parser.add_argument("--optimizer", choices=["adamw", "sgd", "sign_sgd", "muon"], default="adamw")
    parser.add_argument("--lm-head-chunk", type=int)
    offload = parser.add_mutually_exclusive_group()
    offload.add_argument("--optimizer-offload", action="store_true", help="of ours")
    offload.add_argument("--optimizer-state-offload", action="store_true", help="of ours")
    parser.add_argument("--activation-offload", action="store_true", help="of ours")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--fp8", action="store_true", help="of ours")
    parser.add_argument("--router-replay", action="store_true", help="of ours; of experts at random")
    parser.add_argument("--lora", type=int, metavar="RANK", help="of ours")
    parser.add_argument("--plain-recurrence", action="store_true", help="of ours: none of the library's kernels")
    parser.add_argument("--compile", action="store_true", help="each layer, of torchtitan's, too")
    parser.add_argument("--steps", type=int, default=10, help=f"that are timed, after {WARM_UP}")
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--against", choices=["torchtitan", "eager"], help="in turns with ours; ours, not compiled")
    beside.add_argument("--instead", choices=["torchtitan"], help="of ours")
    parser.add_argument("--profile", type=Path, help="directory for tables of where rank 0's time goes in another step")
    parser.add_argument("--out", type=Path, help="also write the result there; the last option")
    return parser.parse_args(words)


def make_recipe(options: argparse.Namespace, on_cpu: bool) -> Any:
    """Return the recipe of a run with these options."""
    from primeslurm.recipe import Recipe

    parallelism = {
        "dp_replicate": options.dp_replicate,
        "ep": options.ep,
        "ep_backend": options.ep_backend,
        "cp": options.cp,
        "cp_style": options.cp_style,
        "activation_checkpointing": options.checkpointing,
        "reduce_gradients": options.reduce_gradients,
    }
    trainer = {
        "parallelism": parallelism,
        "optimizer": {"type": options.optimizer, "lr": 1e-5},
        "memory": {
            "lm_head_chunk": options.lm_head_chunk,
            "optimizer_offload": options.optimizer_offload,
            "optimizer_state_offload": options.optimizer_state_offload,
            "activation_offload": options.activation_offload,
        },
        "fp8": options.fp8,
        "router_replay": options.router_replay,
        "lora": {"rank": options.lora} if options.lora else None,
        "compile": options.compile,
    }
    model = {"path": options.shape, "dtype": options.dtype or ("float32" if on_cpu else "bfloat16")}
    sections = {"seq_len": options.seq, "model": model, "trainer": trainer}
    return Recipe.model_validate(
        {"name": "training-speed", "max_steps": 10_000, "environments": [{"id": "none"}], **sections}
    )


def ours(
    recipe: Any,
    config: Any,
    rows: int,
    world: Any,
    directory: Path,
    first: dict[str, float],
    last: dict[str, float],
    documents: int = 1,
) -> tuple[Step, Any]:
    """Return our step on random rows, and the model. `first` and `last` get the metrics of the first and each step."""
    from primeslurm.records.journal import Journal
    from primeslurm.trainer.assembly.build import assemble
    from primeslurm.trainer.base.phase_timer import PhaseTimer
    from primeslurm.trainer.policy.train_step import TrainStep

    policy = assemble(config, Path(recipe.model.path), recipe, world)
    train_step = TrainStep(policy, recipe, world)
    made = (
        random_batch(
            recipe.seq_len,
            config.vocab_size,
            rows,
            policy.dp_rank,
            policy.dp_world,
            seed,
            documents_of(seed, documents),
            _experts(config, policy.model) if recipe.trainer.router_replay else None,
        )
        for seed in seeds(documents)
    )
    batches = itertools.cycle(joined(batch, recipe.trainer.joined_rows(recipe.seq_len)) for batch in made)
    timer = PhaseTimer(Journal(directory, f"rank-{world.rank}"), record=world.is_main)

    def step() -> None:
        metrics = train_step.train(next(batches), timer)
        _add_compiles(first, metrics)
        first.update({name: value for name, value in metrics.items() if name not in first})
        last.update(metrics)

    return step, policy.model


def seeds(documents: int) -> range:
    """Return the seeds of the batches."""
    return range(BATCHES if documents > 1 else 1)


def documents_of(seed: int, documents: int) -> int:
    """Return the number of documents of each row of a batch."""
    return 1 + seed * (documents - 1) // (BATCHES - 1)


def joined(batch: Any, count: int) -> Any:
    """Join up to `count` rows of a batch to each micro batch, as runs do. 1: leave it as it is."""
    import msgspec
    import numpy as np

    from primeslurm.wire.batches.batch import Batch, Row

    if count == 1:
        return batch
    several = [batch.rows[start : start + count] for start in range(0, len(batch.rows), count)]
    names = batch.rows[0].arrays()
    rows = [Row(**{name: np.concatenate([getattr(row, name) for row in some]) for name in names}) for some in several]
    return Batch(msgspec.structs.replace(batch.info, rows_at_once=1), rows)


def document_lengths(seq_len: int, rows: int, documents: int) -> list[int]:
    """Return the lengths of all documents of the first rank's batches [tokens]."""
    import numpy as np

    batches = [random_batch(seq_len, 2, rows, 0, 1, seed, documents_of(seed, documents)) for seed in seeds(documents)]
    positions = np.concatenate([row.positions for batch in batches for row in batch.rows])
    return [int(last) + 1 for last in positions[np.append(positions[1:], 0) == 0]]


def flops_per_token(
    shape: ModelShape, lengths: Sequence[int], seq_len: int, adapters: int | None = None
) -> tuple[float, float]:
    """Return the operations of a step per token, as runs report them, and the same with all keys of a row.

    Many projects count all keys instead of visible ones. `adapters` are the weights of LoRA adapters that a token
    meets; None without LoRA.
    """
    import numpy as np

    from primeslurm.models.flops import Work, flops

    tokens = sum(lengths)
    visible = Work.of(np.concatenate([np.arange(length) for length in lengths]), shape, tokens - len(lengths))
    window = min(shape.window or seq_len, seq_len)
    everything = replace(visible, pairs=tokens * seq_len, windowed_pairs=tokens * window)
    return tuple(flops(shape, work, adapters=adapters).step / tokens for work in (visible, everything))


def _add_compiles(total: dict[str, float], metrics: Mapping[str, float]) -> None:
    total.update({name: total[name] + metrics[name] for name in total if "compile" in name})


def _experts(config: Any, model: Any) -> tuple[int, int, int]:
    """Return the number of layers with experts, experts per layer, and experts per token."""
    from benchmarks.training_models import expert_count

    return len(model.layers), expert_count(config), config.num_experts_per_tok


def random_batch(
    seq_len: int,
    vocabulary: int,
    rows: int,
    dp_rank: int,
    dp_world: int,
    seed: int = 0,
    documents: int = 1,
    experts: tuple[int, int, int] | None = None,
) -> Any:
    """Make rows of several documents, of which every token but the first is trained.

    Args:
        experts: layers, experts per layer, and experts per token for router replay; None for no replay.
    """
    import numpy as np

    from primeslurm.wire.batches.batch import Batch, BatchInfo, Row

    rng = np.random.default_rng([dp_rank, seed] if seed else dp_rank)

    def positions() -> Any:
        ends = np.sort(rng.choice(np.arange(1, seq_len), documents - 1, replace=False))
        return np.concatenate([np.arange(size, dtype=np.int32) for size in np.diff([0, *ends, seq_len])])

    def routed() -> Any:
        layers, count, top_k = experts or (0, 0, 0)
        first = rng.integers(0, count, (seq_len, layers, 1))
        return ((first + np.arange(top_k) * (count // top_k)) % count).astype(np.uint16)

    made = [
        Row(
            token_ids=rng.integers(0, vocabulary, seq_len, dtype=np.int32),
            positions=positions(),
            mask=np.arange(seq_len) > 0,
            logprobs=np.full(seq_len, -math.log(vocabulary), np.float32),
            advantages=rng.normal(size=seq_len).astype(np.float32),
            temperatures=np.ones(seq_len, np.float32),
            on_policy=np.ones(seq_len, np.bool_),
            routed_experts=routed() if experts else None,
        )
        for _ in range(rows)
    ]
    info = BatchInfo(step=1, dp_rank=dp_rank, dp_world=dp_world, loss_tokens=dp_world * rows * (seq_len - 1))
    return Batch(info, made)


def torchtitans(options: argparse.Namespace, recipe: Any, flavor: str, config: Any, world: Any) -> tuple[Step, Any]:
    """Return torchtitan's step on random rows, and its model."""
    import torch

    from benchmarks.titan_step import TitanStep

    trainer = TitanStep(flavor, config, recipe, options.rows, world)
    per_pass = min(options.rows, recipe.trainer.rows_at_once(options.seq))
    if options.rows % per_pass:
        raise SystemExit(f"--against torchtitan: --rows beyond {per_pass} must be a multiple of it")
    tokens = torch.randint(0, config.vocab_size, (options.rows, options.seq + 1))
    positions = torch.arange(options.seq).expand(per_pass, -1)

    def samples() -> Iterator[Any]:
        for part in tokens.split(per_pass):
            yield {"input": part[:, :-1].contiguous(), "positions": positions}, part[:, 1:].contiguous()

    return lambda: trainer.train(samples()), trainer.model_parts[0]


def take_turns(steps: Mapping[str, Step], count: int, world: Any) -> dict[str, list[tuple[float, float]]]:
    """Return elapsed and CPU seconds of each timed step. All ranks begin each step together."""
    import torch

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(count):
        for name, step in steps.items():
            world.barrier()
            began, used = time.perf_counter(), time.process_time()
            step()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            used = time.process_time() - used
            world.barrier()
            times[name].append((time.perf_counter() - began, used))
    return times


def profile(steps: Mapping[str, Step], directory: Path, world: Any) -> None:
    """Run each step once more, and write its operations and kernels, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = world.device.type == "cuda"
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for name, step in steps.items():
        world.barrier()
        with profiler(activities=kinds, acc_events=True) as found:
            step()
        if world.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            table = found.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=90)
            (directory / f"{name}.txt").write_text(table + "\n")


def warmed_up(make: Callable[[], tuple[Step, Any]], world: Any) -> tuple[Step, Any, float | None]:
    """Return a step after a few runs, its model, and the peak GPU memory [GB]."""
    import torch

    on_gpu = world.device.type == "cuda"
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step, model = make()
    for _ in range(WARM_UP):
        step()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if on_gpu else None
    return step, model, peak


def measure(options: argparse.Namespace, world: Any) -> dict[str, Any]:
    """Measure with all ranks. The result is the same on each."""
    import torch

    from benchmarks.training_models import SHAPES
    from primeslurm.models.hf_config import shape_of
    from primeslurm.nn.kernels import linear_attention
    from primeslurm.trainer.policy.flops_meter import adapter_weights, peak_of

    if options.plain_recurrence:
        linear_attention.fits = lambda mixed: False
    shape = SHAPES[options.shape]
    other = "torchtitan" if "torchtitan" in (options.against, options.instead) else None
    if other and (shape.flavor is None or options.experts or options.optimizer != "adamw"):
        raise SystemExit("torchtitan: it has Qwen3's shapes with all experts alone, and of these optimizers AdamW")
    config = shape.build(options.layers, options.experts, options.vocab)
    recipe = make_recipe(options, world.device.type == "cpu")
    with tempfile.TemporaryDirectory() as directory:
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        eager_first: dict[str, float] = {}
        makers: dict[str, Callable[[], tuple[Step, Any]]] = {}
        if not options.instead:
            makers["ours"] = partial(
                ours, recipe, config, options.rows, world, Path(directory), first, last, options.documents
            )
        if other and shape.flavor:
            makers["torchtitan"] = partial(torchtitans, options, recipe, shape.flavor, config, world)
        if options.against == "eager":
            plain = make_recipe(argparse.Namespace(**vars(options) | {"compile": False}), world.device.type == "cpu")
            makers["eager"] = partial(
                ours, plain, config, options.rows, world, Path(directory), eager_first, {}, options.documents
            )
        made = {name: warmed_up(make, world) for name, make in makers.items()}
        steps, peaks = {name: each[0] for name, each in made.items()}, {name: each[2] for name, each in made.items()}
        model = next(iter(made.values()))[1]
        assert len({_count(each) for _, each, _ in made.values()}) == 1, "both train the same shape"
        times = take_turns(steps, options.steps, world)
        if options.profile:
            profile(steps, options.profile, world)
    tokens = world.size // options.cp * options.rows * options.seq
    lengths = document_lengths(options.seq, options.rows, options.documents)
    model_shape = shape_of(config.to_dict())
    adapters = adapter_weights(model, model_shape) if options.lora else None
    causal, whole = flops_per_token(model_shape, lengths, options.seq, adapters)
    gpu = torch.cuda.get_device_name() if world.device.type == "cuda" else None
    peak = peak_of(gpu) if gpu else None
    found: dict[str, Any] = {"parameters": _count(model), "flops_per_token": causal, "tokens_per_step": tokens}
    medians = {name: [statistics.median(kind) for kind in zip(*each, strict=True)] for name, each in times.items()}
    for name, (median, used) in medians.items():
        found[name] = {
            "seconds": round(median, 4),
            "processor_s": round(used, 4),
            "tokens_per_s": round(tokens / median, 1),
            "peak_gb": None if peaks[name] is None else round(max(world.collect(peaks[name])), 2),
        }
        if peak:
            # Of the peak in bfloat16, with FP8 too, so that both can be compared.
            per_s = tokens / median / world.size / (peak.bf16 * 1e12)
            found[name] |= {"mfu": round(causal * per_s, 4), "mfu_all_keys": round(whole * per_s, 4)}
    found |= {name: last[name] for name in ("allocation_retries",) if name in last}
    found |= {name: first[name] for name in ("compiles", "recompiles", "compile_s") if name in first}
    for name, metrics in (("first_step", first), ("last_step", last), ("eager_first_step", eager_first)):
        if metrics:
            found[name] = {key: metrics[key] for key in sorted(metrics) if key in ("loss", "grad_norm", "mismatch_kl")}
    found["host_gb"] = round(max(world.collect(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)) * 1024 / 1e9, 2)
    if options.against:
        clock = 0 if gpu else 1
        found["speed_ratio"] = round(medians[options.against][clock] / medians["ours"][clock], 4)
    return found | {"gpu": gpu, "dtype": recipe.model.dtype}


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main(words: list[str]) -> None:
    options = arguments(words)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "dtype", "profile")}

    def measured(world: Any) -> dict[str, Any]:
        machine = f"{os.cpu_count()} x {platform.machine()}, load {os.getloadavg()[0]:.1f} at the start"
        return {"machine": machine, **settings, **measure(options, world)}

    ranks.run("training_speed", words, options.ranks, options.out, measured, options.optimizer_offload)
