"""Routed experts on CPU: vLLM 0.32 captures them only in a model runner that needs Triton, which CPUs do not have.

The capture itself (buffers, the store of rows by KV block, what scheduler and server do with them) is vLLM's; here its
CPU runner calls it at the places where the other runner does: when the KV cache is there, before each step, and after
tokens were sampled.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from primeslurm.inference.guards import changed, expect


def apply() -> None:
    """Have vLLM's CPU runner capture routed experts. Raises RuntimeError if vLLM has changed there."""
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if not isinstance(vars(VllmConfig).get("use_v2_model_runner"), property):
        raise changed("VllmConfig.use_v2_model_runner is no property any more")
    _accept(VllmConfig)
    _initialize(CPUModelRunner)
    _execute(CPUModelRunner)
    _sample(CPUModelRunner)


def _accept(config: type) -> None:
    """Keep vLLM's own check of what routed experts go together with, but for the runner."""
    original = expect(config, "_verify_aux_output_compatibility", ("self",))
    as_it_is = vars(config)["use_v2_model_runner"]

    def verify(self: Any) -> None:
        config.use_v2_model_runner = property(lambda _: True)  # type: ignore[attr-defined]
        try:
            original(self)
        finally:
            config.use_v2_model_runner = as_it_is  # type: ignore[attr-defined]

    config._verify_aux_output_compatibility = verify  # type: ignore[attr-defined]


def _initialize(runner: type) -> None:
    original = expect(runner, "initialize_kv_cache", ("self", "kv_cache_config", "is_profiling"))

    def initialize_kv_cache(self: Any, kv_cache_config: Any, is_profiling: bool = False, **more: Any) -> None:
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

        original(self, kv_cache_config, is_profiling, **more)
        self.routed_experts = None
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self.routed_experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    runner.initialize_kv_cache = initialize_kv_cache  # type: ignore[attr-defined]


def _execute(runner: type) -> None:
    original = expect(runner, "execute_model", ("self", "scheduler_output", "intermediate_tensors"))

    def execute_model(self: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self.routed_step = None
        if self.routed_experts is None:
            return original(self, scheduler_output, intermediate_tensors)
        self.routed_experts.begin_step(scheduler_output.aux_output_connector_metadata)
        output = original(self, scheduler_output, intermediate_tensors)
        if output is None:  # the model was run, and sample_tokens follows
            self.routed_step = self.routed_experts.prepare_output(_batch(self, scheduler_output))
        return output

    runner.execute_model = execute_model  # type: ignore[attr-defined]


def _batch(runner: Any, scheduler_output: Any) -> SimpleNamespace:
    """What the capture reads of the other runner's batch: requests, where their rows start, how far they were."""
    batch = runner.input_batch
    requests = list(batch.req_ids)
    scheduled = [scheduler_output.num_scheduled_tokens[request] for request in requests]
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=np.cumsum([0, *scheduled]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(requests)].copy(),
    )


def _sample(runner: type) -> None:
    original = expect(runner, "sample_tokens", ("self", "grammar_output"))

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        step, self.routed_step = self.routed_step, None
        if step is not None:
            places = [output.req_id_to_index[request] for request in step.request_ids]
            sampled = np.array([len(output.sampled_token_ids[place]) for place in places])
            step.enqueue_cpu_copy(num_sampled=sampled, num_rejected=np.zeros_like(sampled))
            output.aux_output_connector_output = step.process_output()
        return output

    runner.sample_tokens = sample_tokens  # type: ignore[attr-defined]
