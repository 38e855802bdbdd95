"""Captures routed experts in vLLM's CPU model runner. vLLM 0.32 does so only in a runner that needs Triton.

vLLM's own code keeps the buffers and stores rows by KV block. These patches make the CPU runner call it where the other
runner does: after the KV cache is initialised, before each step, and after sampling.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from primeslurm.inference.patches import changed_code_error, expect


def apply() -> None:
    """Patch the CPU runner. Raise RuntimeError if vLLM's code has changed."""
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if not isinstance(vars(VllmConfig).get("use_v2_model_runner"), property):
        raise changed_code_error("VllmConfig.use_v2_model_runner is not a property")
    _accept(VllmConfig)
    _initialize(CPUModelRunner)
    _execute(CPUModelRunner)
    _sample(CPUModelRunner)


def _accept(config: type) -> None:
    """Make vLLM's compatibility check pass for this runner, and keep its other conditions."""
    original = expect(config, "_verify_aux_output_compatibility", ("self",))
    runner_property = vars(config)["use_v2_model_runner"]

    def verify(self: Any) -> None:
        config.use_v2_model_runner = property(lambda _: True)  # type: ignore[attr-defined]
        try:
            original(self)
        finally:
            config.use_v2_model_runner = runner_property  # type: ignore[attr-defined]

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
        if output is None:  # the model ran, and vLLM calls sample_tokens next
            self.routed_step = self.routed_experts.prepare_output(_batch(self, scheduler_output))
            self.routed_drafts = scheduler_output.scheduled_spec_decode_tokens
        return output

    runner.execute_model = execute_model  # type: ignore[attr-defined]


def _batch(runner: Any, scheduler_output: Any) -> SimpleNamespace:
    """Return the fields of the other runner's batch that the capture reads."""
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
            indices = [output.req_id_to_index[request] for request in step.request_ids]
            sampled = np.array([len(output.sampled_token_ids[index]) for index in indices])
            drafted = np.array([len(self.routed_drafts.get(request, ())) for request in step.request_ids])
            # A step with drafts samples one token more than it accepts.
            rejected = np.where(drafted > 0, drafted + 1 - sampled, 0)
            step.enqueue_cpu_copy(num_sampled=sampled, num_rejected=rejected)
            output.aux_output_connector_output = step.process_output()
        return output

    runner.sample_tokens = sample_tokens  # type: ignore[attr-defined]
