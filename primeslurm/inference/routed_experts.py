"""Router replay with P/D and KV tiers. vLLM 0.32 refuses P/D, and ends at a KV block without routed experts.

A row holds the experts of one token, [layers, top_k]. vLLM stores the rows of a KV block under the block's hash, so
hits in the prefix cache have rows. These patches cover KV blocks that come from elsewhere:

- P/D: the prefill engine's answer carries the prompt's rows in `kv_transfer_params`, which the router forwards. The
  decode engine computes the last token of the prompt again, and returns the rows before it with its own.
- CPU tier: the row store has room for the blocks of the tier, too.
- Mooncake, or a disk tier: these hold too many blocks, or blocks of other engines. The engine loads only blocks whose
  rows the request does not ask for, which are all earlier turns of a conversation, and computes the others.

A row that is missing nevertheless has only the largest value of its dtype, and the trainer's router chooses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
from types import SimpleNamespace
from typing import Any

import numpy as np

from primeslurm.inference.patches import expect

# Option of an engine that returns routed experts.
REPLAY_OPTION = "--enable-return-routed-experts"
# Key of the prompt's rows in `kv_transfer_params`: a .npy file in base64.
PROMPT_ROWS = "primeslurm_routed_experts"


def apply() -> None:
    """Apply all patches of this module to vLLM. Raise RuntimeError if vLLM's code has changed."""
    from vllm.config.vllm import VllmConfig
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
    from vllm.distributed.aux_output_connector.store import BlockObjectStore
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    _accept_nixl(VllmConfig)
    _begin_inside_blocks(RoutedExpertsBuffer)
    _fill_missing_blocks(BlockObjectStore)
    _store_rows_of_cpu_tier(AuxOutputWorkerConnector)
    _limit_mooncake(MooncakeStoreScheduler)
    _limit_disk_tier(OffloadingConnectorScheduler)
    _carry_prompt_rows(ServingTokens)


def _accept_nixl(config: Any) -> None:
    original = expect(config, "_verify_aux_output_compatibility", ("self",))

    @functools.wraps(original)
    def verify(self: Any) -> None:
        transfer = self.kv_transfer_config
        if transfer is None or not transfer.has_connector("NixlConnector"):
            return original(self)
        self.kv_transfer_config = None  # the check of connectors is the only one that reads it
        try:
            original(self)
        finally:
            self.kv_transfer_config = transfer

    config._verify_aux_output_compatibility = verify


def _begin_inside_blocks(buffer: Any) -> None:
    """Let the rows of a request begin inside a KV block, as on decode engines. The block's first rows are missing."""
    original = expect(buffer, "capture", ("self", "request_id", "token_start", "rows"))
    expect(buffer, "_tail", ("self", "request_id", "block_start"))

    @functools.wraps(original)
    def capture(self: Any, request_id: Any, token_start: int, rows: np.ndarray) -> Any:
        missing = token_start % self.block_size
        if missing and request_id not in self._requests:
            tail = self._tail(request_id, token_start - missing)
            self._rows[tail.slot, :missing] = np.iinfo(self.dtype).max
            tail.length = missing
        return original(self, request_id, token_start, rows)

    buffer.capture = capture


def _fill_missing_blocks(store: Any) -> None:
    original = expect(store, "get_concatenated", ("self", "keys"))

    @functools.wraps(original)
    def get_concatenated(self: Any, keys: list[str]) -> bytes:
        if all(key in self._lru for key in keys):
            return bytes(original(self, keys))
        missing = b"\xff" * self.object_nbytes  # the largest value of every unsigned dtype
        return b"".join(original(self, [key]) if key in self._lru else missing for key in keys)

    store.get_concatenated = get_concatenated


def _store_rows_of_cpu_tier(connector: Any) -> None:
    original = expect(connector, "__init__", ("vllm_config", "model", "kv_cache_config"))

    @functools.wraps(original)
    def init(self: Any, *, vllm_config: Any, model: Any, kv_cache_config: Any) -> None:
        # vLLM derives only the size of the row store from the number of blocks.
        blocks = kv_cache_config.num_blocks + cpu_tier_blocks(vllm_config, kv_cache_config)
        larger = dataclasses.replace(kv_cache_config, num_blocks=blocks)
        original(self, vllm_config=vllm_config, model=model, kv_cache_config=larger)

    connector.__init__ = init


def cpu_tier_blocks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the largest number of KV blocks that an engine's CPU tier can hold."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not kv_cache_config.num_blocks:
        return 0
    extra = transfer.kv_connector_extra_config
    connectors = [{"kv_connector": transfer.kv_connector, "kv_connector_extra_config": extra}]
    connectors += extra.get("connectors", [])
    tier = sum(
        int(connector["kv_connector_extra_config"].get("cpu_bytes_to_use", 0))
        for connector in connectors
        if connector["kv_connector"] == "OffloadingConnector"
    )
    # Not multiplied by the number of workers, because a tier may hold one copy for all of them. Rows are small.
    worker_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    return int(tier * kv_cache_config.num_blocks // worker_bytes)


def first_row(request: Any) -> int:
    """Return the first position of a vLLM request whose row the engine still has to return."""
    if request.num_output_tokens:
        return int(request.num_tokens - 1)
    return int(min(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens))


def _limit_mooncake(scheduler: Any) -> None:
    original = expect(scheduler, "get_num_new_matched_tokens", ("self", "request", "num_computed_tokens"))

    @functools.wraps(original)
    def matched(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        limit = first_row(request) // self._block_size * self._block_size
        if limit <= num_computed_tokens:
            return 0, False
        # vLLM computes at least one token, so it looks up fewer tokens than it is given.
        shorter = SimpleNamespace(
            request_id=request.request_id,
            num_tokens=min(limit + 1, request.num_tokens),
            block_hashes=request.block_hashes,
        )
        result: tuple[int | None, bool] = original(self, shorter, num_computed_tokens)
        return result

    scheduler.get_num_new_matched_tokens = matched


def _limit_disk_tier(scheduler: Any) -> None:
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    original = expect(scheduler, "get_num_new_matched_tokens", ("self", "request", "num_computed_tokens"))

    @functools.wraps(original)
    def matched(self: Any, request: Any, num_computed_tokens: int, **more: Any) -> tuple[int | None, bool]:
        if isinstance(self.manager, TieringOffloadingManager):
            self._req_status[request.request_id].max_load_tokens = max(0, first_row(request) - num_computed_tokens)
        result: tuple[int | None, bool] = original(self, request, num_computed_tokens, **more)
        return result

    scheduler.get_num_new_matched_tokens = matched


def _carry_prompt_rows(serving: Any) -> None:
    original = expect(serving, "serve_tokens", ("self", "request", "raw_request"))

    @functools.wraps(original)
    async def serve_tokens(self: Any, request: Any, raw_request: Any = None) -> Any:
        transfer, sampling = request.kv_transfer_params or {}, request.sampling_params
        prefills, text = transfer.get("do_remote_decode"), transfer.pop(PROMPT_ROWS, None)
        prompt_rows: np.ndarray | None = None
        if text is not None:
            # Without the row of the prompt's last token, which this engine computes again.
            prompt_rows = (await asyncio.to_thread(_decode, text))[:-1]
            sampling.routed_experts_prompt_start += len(prompt_rows)
        answer = await original(self, request, raw_request)
        for choice in getattr(answer, "choices", ()):  # an error has none
            if prefills and answer.kv_transfer_params:
                answer.kv_transfer_params[PROMPT_ROWS], choice.routed_experts = choice.routed_experts, None
            elif prompt_rows is not None and choice.routed_experts is not None:
                choice.routed_experts = await asyncio.to_thread(_prepend, prompt_rows, choice.routed_experts)
        return answer

    serving.serve_tokens = serve_tokens


def _decode(text: str) -> np.ndarray:
    import pybase64

    rows: np.ndarray = np.load(io.BytesIO(pybase64.b64decode(text, validate=True)), allow_pickle=False)
    return rows


def _prepend(rows: np.ndarray, text: str) -> str:
    from vllm.utils.serial_utils import numpy2base64

    return numpy2base64(np.concatenate((rows, _decode(text))))
