"""KV-cache offload for CPU engines. vLLM 0.32 offloads only from accelerators, with CUDA copies.

This worker copies between host tensors. vLLM still decides which blocks are stored, looked up and evicted, and manages
the shared memory and the disk tier.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from primeslurm.inference.patches import expect


class HostOffloadingWorker(OffloadingWorker):
    """Replaces vLLM's `CPUOffloadingWorker` for a KV cache in host memory. Transfers complete at once."""

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: Any = None,
        canonical_layout: bool = False,
    ) -> None:
        if canonical_layout:
            raise NotImplementedError("canonical_layout is not supported on CPU")
        self._region = mmap_region
        self._blocks_per_chunk = blocks_per_chunk
        self._layers = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []
        self._cache: list[torch.Tensor] = []
        """The KV cache: per tensor [blocks, bytes per block]."""
        self._tier: list[torch.Tensor] = []
        """The offload tier: per tensor [chunks, blocks per chunk, bytes per block]."""
        for entry in kv_caches.tensors:
            page = entry.page_size_bytes
            self._cache.append(entry.tensor.view(torch.int8).view(-1, page))
            if mmap_region is None:
                chunks = torch.zeros(num_cpu_chunks, page * blocks_per_chunk, dtype=torch.int8)
            else:
                chunks = mmap_region.create_next_worker_view(page * blocks_per_chunk)
            self._tier.append(chunks.unflatten(1, (blocks_per_chunk, page)))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, because no transfer is ever pending."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._tier.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _copy(self, job_id: int, cache_spec: Any, tier_spec: Any, *, store: bool) -> bool:
        began, copied = time.perf_counter(), 0
        for group, (blocks, chunks, places) in enumerate(self._groups(cache_spec, tier_spec)):
            for layer in self._layers[group]:
                size = layer.page_size_bytes
                cache, tier = self._cache[layer.tensor_idx][:, :size], self._tier[layer.tensor_idx][:, :, :size]
                if store:
                    tier[chunks, places] = cache[blocks]
                else:
                    cache[blocks] = tier[chunks, places]
                copied += len(blocks) * size
        self._finished.append(TransferResult(job_id, True, copied, time.perf_counter() - began))
        return True

    def _groups(self, cache_spec: Any, tier_spec: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield per KV-cache group three index tensors [blocks]: cache block, chunk, and position in the chunk."""
        per_chunk = self._blocks_per_chunk
        blocks, chunks = torch.from_numpy(cache_spec.block_ids), torch.from_numpy(tier_spec.block_ids)
        block = chunk = 0
        for size, index in zip(cache_spec.group_sizes, cache_spec.block_indices, strict=True):
            positions = torch.arange(size) + index % per_chunk  # a transfer may begin in the middle of a chunk
            used = int(positions[-1]) // per_chunk + 1 if size else 0
            yield (
                blocks[block : block + size].long(),
                chunks[chunk : chunk + used].long()[positions // per_chunk],
                positions % per_chunk,
            )
            block, chunk = block + size, chunk + used


def apply() -> None:
    """Make vLLM use `HostOffloadingWorker`. Raise RuntimeError if vLLM's code has changed."""
    from vllm.v1.kv_offload.cpu import spec as cpu
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
    from vllm.v1.kv_offload.tiering import spec as tiering

    parameters = ("kv_caches", "blocks_per_chunk", "num_cpu_chunks", "mmap_region", "canonical_layout")
    expect(CPUOffloadingWorker, "__init__", parameters)
    expect(cpu.CPUOffloadingSpec, "get_worker", ("kv_caches",))
    expect(cpu.CPUOffloadingSpec, "create_worker", ("kv_caches",))
    for module in (cpu, tiering):
        module.CPUOffloadingWorker = HostOffloadingWorker
    cpu.CPUOffloadingSpec.get_worker = _get_worker


def _get_worker(self: Any, kv_caches: Any) -> OffloadingWorker:
    # As vLLM's method, without the check that refuses platforms other than accelerators.
    if self._worker is None:
        self._worker = self.create_worker(kv_caches)
    worker: OffloadingWorker = self._worker
    return worker
