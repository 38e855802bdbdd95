"""Patches of vLLM 0.32 for CPU engines. Without them mixture-of-experts models crash or silently give wrong results.

Each patch checks that vLLM's code is as expected, and refuses to be applied otherwise. Review all of them whenever the
pinned version changes.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from primeslurm.inference.patches import changed_code_error, expect
from primeslurm.testbed.cpu_engine import kv_offload, routed_experts

# Delay between two polls of NIXL's progress thread [microseconds].
NIXL_PAUSE_US = 1000


def apply() -> None:
    """Apply every patch. Raise RuntimeError if vLLM's code is not as a patch expects it."""
    _repack_experts_after_update()
    _map_experts_under_expert_parallelism()
    _add_variable_collectives()
    _fork_processes()
    _expand_sampling_parameters()
    _apply_adapters_by_row()
    kv_offload.apply()
    routed_experts.apply()
    _slow_down_nixl_polls()


def _repack_experts_after_update() -> None:
    """Repack the experts after every weight update. vLLM packs them only when it builds their kernel."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = expect(UnquantizedFusedMoEMethod, "_setup_kernel", ("self", "layer", "w13", "w2"))

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def _apply_adapters_by_row() -> None:
    """Leave rows without an adapter unchanged, and multiply the rows of an adapter together.

    vLLM's CPU code takes the last slot's adapter for rows of the base model (index -1), and copies an adapter per row.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    expect(PunicaWrapperCPU, "_apply_shrink", ("y", "x", "w_t_all", "scale"))
    expect(PunicaWrapperCPU, "_apply_expand", ("y", "x", "w_t_all", "y_offset", "y_slice_size", "add_inputs"))

    def products(self: Any, x: torch.Tensor, weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        indices = self.token_lora_indices
        for index in indices.unique().tolist():
            if index >= 0:
                rows = (indices == index).nonzero()[:, 0]
                yield rows, x[rows] @ weights[index].flatten(0, -2).to(x.dtype).T

    def _apply_shrink(self: Any, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        flat = y.view(-1, y.shape[-1]).zero_()
        for rows, product in products(self, x, w_t_all):
            flat[rows, : product.shape[1]] = (product * scale).to(y.dtype)

    def _apply_expand(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        part = y[:, y_offset : y_offset + y_slice_size]
        if not add_inputs:
            part.zero_()
        for rows, product in products(self, x, w_t_all):
            part[rows] += product.to(y.dtype)

    PunicaWrapperCPU._apply_shrink = _apply_shrink
    PunicaWrapperCPU._apply_expand = _apply_expand


def _map_experts_under_expert_parallelism() -> None:
    """Map global expert ids to local ones, with weight 0 for remote experts.

    vLLM's CPU experts ignore `expert_map` and read past the local experts.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = expect(CPUUnquantizedExperts, "apply", ("topk_weights", "topk_ids", "expert_map"))
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply_local(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        expert_map = call.arguments["expert_map"]
        if expert_map is not None:
            ids = call.arguments["topk_ids"]
            local = expert_map[ids.long()]
            call.arguments["topk_weights"] = call.arguments["topk_weights"].masked_fill(local < 0, 0.0)
            call.arguments["topk_ids"] = local.clamp_min(0).to(ids.dtype)
            call.arguments["expert_map"] = None
        original(*call.args, **call.kwargs)

    CPUUnquantizedExperts.apply = apply_local


def _add_variable_collectives() -> None:
    """Add two collectives that expert parallelism needs and vLLM's CPU communicator lacks."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    expect(DeviceCommunicatorBase, "all_gatherv", ("input_", "dim", "sizes"))
    expect(DeviceCommunicatorBase, "reduce_scatterv", ("input_", "dim", "sizes"))
    for name in ("all_gatherv", "reduce_scatterv"):
        if name in vars(CpuCommunicator):
            raise changed_code_error(f"CpuCommunicator now has {name}")
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _fork_processes() -> None:
    """Fork the engine core and workers, as vLLM does on GPUs. A spawned process takes 8 CPU seconds to import vLLM.

    vLLM spawns them on CPU because OpenMP threads do not survive a fork. With one OpenMP thread none is lost.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = expect(CpuPlatform, "check_and_update_config", ("vllm_config",))

    @functools.wraps(original)
    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        if os.environ.get("OMP_NUM_THREADS") == "1":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def _expand_sampling_parameters() -> None:
    """Repeat each request's temperature, top-k and top-p for its draft tokens.

    vLLM's own CPU version writes into a converted copy, so drafts are judged at temperatures from uninitialised memory.
    """
    from vllm.utils import cpu_triton_utils

    expect(cpu_triton_utils, "_expand_kernel_impl", ("output", "input_val", "cu_num_tokens", "replace_from"))
    cpu_triton_utils._expand_kernel_impl = _expand


def _expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    *_: object,
) -> None:
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.repeat_interleave(counts))


def _all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate the ranks' tensors [sizes[rank], ...] along dim 0. With `sizes=None` all have the same size."""
    if dim != 0:
        raise NotImplementedError("all_gatherv gathers along dim 0")
    if isinstance(input_, torch.Tensor):
        return _gather_rows(self, input_, sizes)
    return [_gather_rows(self, tensor, sizes) for tensor in input_]


def _gather_rows(self: Any, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    sizes = sizes or [rows.shape[0]] * self.world_size
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))  # gloo gathers only equal shapes
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.cpu_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum over ranks. Each rank keeps its `sizes[rank]` rows along `dim`."""
    rows = input_.movedim(dim, 0).contiguous().clone()
    dist.all_reduce(rows, group=self.cpu_group)
    sizes = sizes or [rows.shape[0] // self.world_size] * self.world_size
    start = sum(sizes[: self.rank_in_group])
    return rows[start : start + sizes[self.rank_in_group]].movedim(0, dim).contiguous()


def _slow_down_nixl_polls() -> None:
    """Make NIXL's progress thread sleep between polls, for all agents that vLLM creates from now on.

    NIXL's Python API sets the delay to 0, so the thread of an idle engine uses a whole core. GPU hosts have cores to
    spare. On a small machine two such engines leave no core for computation.
    """
    from vllm.distributed import nixl_utils

    load = expect(nixl_utils, "_load_nixl_attr", ("name",))

    @functools.wraps(load)
    def load_and_pause(name: str) -> Any:
        value = load(name)
        if name == "NixlWrapper" and value is not None:
            _pause_nixl(sys.modules[value.__module__])
        return value

    nixl_utils._load_nixl_attr = load_and_pause


def _pause_nixl(api: Any) -> None:
    """Wrap the agent constructor in NIXL's Python module `api`."""
    bindings = api.nixlBind
    create = bindings.nixlAgent
    if not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        raise changed_code_error("nixlAgentConfig has no pthrDelay")

    def create_pausing(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_PAUSE_US
        return create(name, config)

    bindings.nixlAgent = create_pausing
