"""Names that other tools give to fields of a recipe: verl, slime, prime-rl, vLLM, sbatch, and Hugging Face's trainers.

The table alone; `aliases` looks names up in it. `check` does so before it guesses by spelling, and the migration pages
print it, one tool at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tool = Literal["verl", "slime", "prime-rl", "vllm", "slurm", "hf"]
TOOLS: dict[Tool, str] = {
    "verl": "verl",
    "slime": "slime",
    "prime-rl": "prime-rl",
    "vllm": "vLLM",
    "slurm": "sbatch",
    "hf": "transformers and TRL",
}
"""Each tool's name as people write it."""
_SITE = "site: "


@dataclass(frozen=True)
class Alias:
    """One concept: the field that holds it here, and the keys that hold it elsewhere."""

    field: str
    """Field of a recipe, or of a site file with `site: ` in front. `[]` stands for each entry of a list."""
    note: str
    """What the field means or how it differs, in one phrase."""
    keys: dict[Tool, tuple[str, ...]]
    """Keys by tool, as that tool's users write them, with dots between sections and without leading dashes."""

    @property
    def advice(self) -> str:
        """What to write instead, for the end of a message."""
        place = " of the site file" if self.of_site else ""
        return f"use {self.field.removeprefix(_SITE)}{place}: {self.note}"

    @property
    def of_site(self) -> bool:
        """Whether the field is one of the site file."""
        return self.field.startswith(_SITE)


@dataclass(frozen=True)
class ValueAlias:
    """A value that other tools have for a choice that is called otherwise here."""

    field: str
    """As of `Alias`."""
    theirs: tuple[str, ...]
    ours: str
    note: str

    @property
    def advice(self) -> str:
        """What to write instead, for the end of a message."""
        return f"use {self.ours}: {self.note}"


def _alias(
    field: str,
    note: str,
    *,
    verl: str = "",
    slime: str = "",
    prime_rl: str = "",
    vllm: str = "",
    slurm: str = "",
    hf: str = "",
) -> Alias:
    """Make an entry. Keys of one tool are words with spaces between them."""
    given: dict[Tool, str] = {
        "verl": verl,
        "slime": slime,
        "prime-rl": prime_rl,
        "vllm": vllm,
        "slurm": slurm,
        "hf": hf,
    }
    return Alias(field, note, {tool: tuple(keys.split()) for tool, keys in given.items() if keys})


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

ALIASES: tuple[Alias, ...] = (
    # The run
    _alias(
        "name",
        "name of the run and of its directory",
        verl="trainer.experiment_name",
        prime_rl="run.name slurm.job_name",
        slurm="job-name",
        hf="run_name",
    ),
    _alias(
        "max_steps",
        "optimizer steps of the whole run",
        verl="trainer.total_training_steps trainer.total_epochs",
        slime="num-rollout num-epoch",
        hf="num_train_epochs",
    ),
    _alias(
        "seq_len",
        "longest trained sequence, prompt and answer together",
        verl="data.max_prompt_length",
        slime="rollout-max-prompt-len rollout-max-context-len",
        prime_rl="trainer.model.seq_len orchestrator.seq_len",
        hf="max_seq_length max_prompt_length",
    ),
    _alias("seed", "of everything random", slime="rollout-seed", hf="data_seed"),
    _alias("task", "rl, sft, serve or eval", verl="trainer.val_only", slime="debug-rollout-only"),
    _alias(
        "site: runs",
        "directory of all runs",
        verl="trainer.default_local_dir",
        slime="save load",
        prime_rl="output_dir run.dir",
        slurm="chdir",
        hf="output_dir logging_dir",
    ),
    # Model
    _alias(
        "model.path",
        "directory in Hugging Face format, or a hub id in the cache",
        verl="actor_rollout_ref.model.path",
        slime="hf-checkpoint",
        prime_rl="model.name trainer.model.name orchestrator.model.name inference.vllm.model",
        vllm="model.tokenizer",
        hf="model_name model_name_or_path model_id pretrained_model_name_or_path",
    ),
    _alias(
        "model.dtype",
        "compute dtype of trainer and engines; masters are float32",
        prime_rl="inference.vllm.dtype trainer.model.optimization_dtype",
        hf="torch_dtype bf16 fp16",
    ),
    _alias(
        "model.max_len",
        "longest sequence that an engine accepts",
        verl=f"{_ROLLOUT}.max_model_len",
        slime="sglang-context-length",
        prime_rl="inference.vllm.max_model_len",
        vllm="max-model-len",
        hf="vllm_max_model_length",
    ),
    _alias("model.impl", "custom, or hf for transformers' code", prime_rl="trainer.model.impl", hf="use_liger_kernel"),
    _alias(
        "model.vlm",
        "train on images, too",
        slime="multimodal-keys",
        prime_rl="model.vlm.vision_encoder_attr trainer.model.vlm",
    ),
    _alias(
        "model.vlm.freeze_vision_encoder",
        "train the language model alone",
        prime_rl="model.vlm.freeze_vision_encoder",
        hf="freeze_vision_tower",
    ),
    _alias(
        "model.renderer",
        "how messages become tokens; it is checked against the model's chat template",
        verl="actor_rollout_ref.model.custom_chat_template",
        slime="apply-chat-template",
        prime_rl="orchestrator.renderer.name tokenizer.chat_template orchestrator.renderer",
        vllm="chat-template",
        hf="chat_template_path",
    ),
    _alias(
        "model.renderer_options",
        "for example enable_thinking: false",
        verl="data.apply_chat_template_kwargs",
        slime="apply-chat-template-kwargs",
        prime_rl="extra_body.chat_template_kwargs",
        hf="chat_template_kwargs",
    ),
    # Optimizer
    _alias(
        "trainer.optimizer.lr",
        "learning rate",
        verl=f"{_ACTOR}.optim.lr",
        slime="lr",
        prime_rl="trainer.optim.lr",
        hf="learning_rate",
    ),
    _alias(
        "trainer.optimizer.type",
        "adamw, muon, sgd or sign_sgd",
        slime="optimizer",
        prime_rl="trainer.optim.type trainer.optim",
        hf="optim",
    ),
    _alias(
        "trainer.optimizer.betas",
        "both in one list",
        verl=f"{_ACTOR}.optim.betas",
        slime="adam-beta1 adam-beta2",
        prime_rl="trainer.optim.betas1 trainer.optim.betas2",
        hf="adam_beta1 adam_beta2",
    ),
    _alias("trainer.optimizer.eps", "of AdamW", slime="adam-eps", hf="adam_epsilon"),
    _alias("trainer.optimizer.momentum", "of Muon and SGD", slime="sgd-momentum", prime_rl="trainer.optim.mu"),
    _alias(
        "trainer.optimizer.weight_decay",
        "0 by default",
        verl=f"{_ACTOR}.optim.weight_decay",
        slime="weight-decay",
        prime_rl="trainer.optim.weight_decay",
        hf="weight_decay",
    ),
    _alias(
        "trainer.optimizer.max_norm",
        "the global gradient norm is clipped to this",
        verl=f"{_ACTOR}.grad_clip",
        slime="clip-grad",
        prime_rl="trainer.optim.max_norm",
        hf="max_grad_norm gradient_clipping",
    ),
    _alias(
        "trainer.optimizer.warmup_steps",
        "steps, not a ratio",
        verl=f"{_ACTOR}.optim.lr_warmup_steps {_ACTOR}.optim.lr_warmup_steps_ratio",
        slime="lr-warmup-iters lr-warmup-fraction",
        prime_rl="trainer.scheduler.warmup_steps",
        hf="warmup_ratio",
    ),
    _alias(
        "trainer.optimizer.schedule",
        "constant, linear or cosine",
        verl=f"{_ACTOR}.optim.warmup_style {_ACTOR}.optim.lr_scheduler_type",
        slime="lr-decay-style",
        prime_rl="trainer.scheduler.type trainer.scheduler",
        hf="lr_scheduler_type",
    ),
    _alias(
        "trainer.optimizer.min_lr_ratio",
        "a part of lr, not a learning rate",
        verl=f"{_ACTOR}.optim.min_lr_ratio",
        slime="min-lr",
        prime_rl="trainer.scheduler.min_lr",
        hf="lr_scheduler_kwargs",
    ),
    # Loss
    _alias(
        "trainer.loss.type",
        "dppo, ipo, grpo_clip (the clipped ratio of PPO and GRPO), gspo, cispo or custom",
        verl=f"{_ACTOR}.policy_loss.loss_mode {_ACTOR}.policy_loss",
        slime="loss-type",
        prime_rl="trainer.loss.type",
        hf="loss_type importance_sampling_level",
    ),
    _alias(
        "trainer.loss.clip_low",
        "with trainer.loss.type: grpo_clip or gspo",
        verl=f"{_ACTOR}.clip_ratio {_ACTOR}.clip_ratio_low",
        slime="eps-clip",
        hf="epsilon cliprange",
    ),
    _alias(
        "trainer.loss.clip_high",
        "with trainer.loss.type: grpo_clip or gspo",
        verl=f"{_ACTOR}.clip_ratio_high",
        slime="eps-clip-high",
        hf="epsilon_high",
    ),
    _alias(
        "trainer.loss.dual_clip",
        "with trainer.loss.type: grpo_clip",
        verl=f"{_ACTOR}.clip_ratio_c",
        slime="eps-clip-c",
        hf="delta",
    ),
    _alias(
        "trainer.loss.ratio_cap",
        "largest importance weight; truncated importance sampling is always on",
        verl="algorithm.rollout_is_threshold algorithm.rollout_is algorithm.rollout_correction",
        slime="tis-clip use-tis",
        hf="vllm_importance_sampling_cap vllm_importance_sampling_correction",
    ),
    _alias(
        "trainer.loss.average",
        "tokens, rollouts or seq_len",
        verl=f"{_ACTOR}.loss_agg_mode",
        slime="calculate-per-token-loss",
        hf="scale_rewards",
    ),
    _alias(
        "trainer.loss.ref_kl",
        "factor of the KL to a frozen model, which the section `teacher` names",
        verl=f"{_ACTOR}.kl_loss_coef {_ACTOR}.use_kl_loss algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward",
        slime="kl-loss-coef kl-coef use-kl-loss",
        prime_rl="orchestrator.algo.ref_kl",
        hf="beta kl_coef init_kl_coef",
    ),
    _alias(
        "trainer.loss.ref_kl", "there is one estimator of the KL; leave its type out", verl=f"{_ACTOR}.kl_loss_type"
    ),
    _alias(
        "trainer.loss.function",
        "there is no entropy bonus; a function of yours gets the entropy, with trainer.loss.type: custom",
        verl=f"{_ACTOR}.entropy_coeff",
    ),
    _alias(
        "inference",
        "engines are always vLLM; leave the name out",
        verl=f"{_ROLLOUT}.name",
    ),
    _alias(
        "orchestrator.advantages",
        "there is no critic; leave its options out",
        verl="trainer.critic_warmup",
    ),
    _alias(
        "seq_len",
        "a rollout that reaches it is truncated; there is no other option",
        verl="data.truncation",
    ),
    _alias("trainer.loss.mask_low", "with trainer.loss.type: dppo", prime_rl="trainer.loss.dppo_mask_low"),
    _alias("trainer.loss.mask_high", "with trainer.loss.type: dppo", prime_rl="trainer.loss.dppo_mask_high"),
    _alias("trainer.loss.threshold", "with trainer.loss.type: ipo", prime_rl="trainer.loss.ipo_threshold"),
    _alias(
        "trainer.loss.function",
        "module:function, with trainer.loss.type: custom",
        slime="custom-loss-function-path",
        prime_rl="trainer.loss.import_path",
    ),
    # Parallelism of the trainer
    _alias(
        "trainer.parallelism.cp",
        "ranks that share each row of tokens",
        verl=f"{_ACTOR}.ulysses_sequence_parallel_size ulysses_sequence_parallel_size megatron.context_parallel_size",
        slime="context-parallel-size",
        prime_rl="trainer.model.cp",
        hf="sp_size cp_size",
    ),
    _alias(
        "trainer.parallelism.cp_style",
        "ulysses, or allgather (often called ring attention)",
        slime="allgather-cp",
        prime_rl="trainer.model.cp_style",
    ),
    _alias(
        "trainer.parallelism.ep",
        "trainer ranks that share the experts",
        verl="megatron.expert_model_parallel_size",
        slime="expert-model-parallel-size",
        prime_rl="trainer.model.ep",
    ),
    _alias(
        "trainer.parallelism.ep_backend",
        "torch or deepep",
        slime="moe-token-dispatcher-type moe-enable-deepep",
        prime_rl="trainer.model.ep_comm_backend",
    ),
    _alias(
        "trainer.parallelism.deepep_token_chunk",
        "tokens of a rank that DeepEP sends together",
        prime_rl="trainer.model.deepep_token_chunk_size",
    ),
    _alias(
        "trainer.parallelism.dp_replicate",
        "replicas of the sharded model (HSDP); FSDP shards over the other ranks",
        verl=f"{_ACTOR}.fsdp_config.fsdp_size",
        prime_rl="trainer.model.dp_replicate deployment.nodes_per_fsdp_group",
        hf="dp_replicate_size fsdp",
    ),
    _alias(
        "trainer.parallelism",
        "the trainer shards by FSDP, ep and cp; it has no tensor or pipeline parallelism",
        verl="megatron.tensor_model_parallel_size megatron.pipeline_model_parallel_size",
        slime="tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel",
        vllm="pipeline-parallel-size",
        hf="deepspeed parallelism_config",
    ),
    _alias(
        "trainer.parallelism.activation_checkpointing",
        "none, selective or full",
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
        slime="recompute-granularity recompute-method recompute-num-layers",
        prime_rl="trainer.model.ac.mode trainer.model.ac.freq trainer.model.ac",
        hf="gradient_checkpointing",
    ),
    _alias(
        "trainer.parallelism.reshard_after_forward",
        "true saves memory, false saves communication",
        verl=f"{_ACTOR}.fsdp_config.reshard_after_forward",
        prime_rl="trainer.model.reshard_after_forward",
    ),
    _alias(
        "trainer.parallelism.gradient_dtype",
        "dtype in which gradients are summed over ranks",
        slime="accumulate-allreduce-grads-in-fp32",
        prime_rl="trainer.model.reduce_dtype",
    ),
    # Memory of the trainer
    _alias(
        "trainer.memory.optimizer_state_offload",
        "optimizer state in host memory; the step is the same, bit for bit",
        verl=f"{_ACTOR}.fsdp_config.optimizer_offload",
        slime="optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d",
        prime_rl="trainer.model.optim_cpu_offload",
    ),
    _alias(
        "trainer.memory.optimizer_offload",
        "masters, gradients and optimizer state in host memory",
        verl=f"{_ACTOR}.fsdp_config.param_offload {_ACTOR}.fsdp_config.offload_policy",
        slime="offload-train offload",
        prime_rl="trainer.model.full_offload trainer.model.fsdp_cpu_offload",
    ),
    _alias(
        "trainer.memory.activation_offload",
        "saved activations in host memory",
        verl="actor_rollout_ref.model.enable_activation_offload",
        prime_rl="trainer.model.ac_offloading",
        hf="activation_offloading",
    ),
    _alias(
        "trainer.memory.lm_head_chunk",
        "tokens whose logits exist together",
        verl="entropy_from_logits_with_chunking",
        slime="log-probs-chunk-size",
        prime_rl="trainer.model.fused_lm_head_token_chunk_size",
    ),
    _alias(
        "trainer.micro_batch_tokens",
        "tokens that a rank computes together; the number of micro batches of a step follows from it",
        verl=f"{_ACTOR}.ppo_max_token_len_per_gpu {_ACTOR}.ppo_micro_batch_size_per_gpu {_ACTOR}.ppo_micro_batch_size",
        slime="max-tokens-per-gpu micro-batch-size use-dynamic-batch-size",
        hf="gradient_accumulation_steps gradient_accumulation per_device_train_batch_size micro_batch_size",
    ),
    _alias(
        "trainer.compile",
        "compile each layer by torch.compile",
        verl=f"{_ACTOR}.use_torch_compile",
        prime_rl="trainer.model.compile",
        hf="torch_compile",
    ),
    _alias(
        "trainer.fp8",
        "linear layers and experts compute in block-scaled FP8",
        slime="fp8-format fp8-recipe",
        prime_rl="trainer.model.quantization trainer.model.moe.compute",
    ),
    _alias(
        "trainer.grouped_products",
        "the products of a layer's experts are one call",
        slime="moe-grouped-gemm",
        prime_rl="trainer.model.moe_use_grouped_mm",
    ),
    _alias(
        "trainer.router_replay",
        "train with the experts that the engines chose",
        verl=f"{_ACTOR}.router_replay {_ROLLOUT}.enable_rollout_routing_replay",
        slime="use-rollout-routing-replay use-routing-replay",
        prime_rl="trainer.enable_router_replay inference.vllm.enable_return_routed_experts",
        vllm="enable-return-routed-experts",
    ),
    _alias(
        "trainer.hang_timeout_s",
        "seconds without progress within a step until the attempt ends",
        verl="actor_rollout_ref.nccl_timeout",
        slime="distributed-timeout-minutes",
        prime_rl="trainer.dist_timeout_seconds",
        hf="ddp_timeout",
    ),
    _alias(
        "trainer.lora.rank",
        "a multiple of 8; engines get the merged weights",
        verl="actor_rollout_ref.model.lora_rank",
        prime_rl="trainer.model.lora.rank orchestrator.model.lora.rank trainer.model.lora",
        vllm="max-lora-rank enable-lora",
        hf="lora_r peft_config use_peft",
    ),
    _alias(
        "trainer.lora.alpha",
        "a weight changes by alpha / rank times its adapter",
        verl="actor_rollout_ref.model.lora_alpha",
        prime_rl="trainer.model.lora.alpha",
        hf="lora_alpha",
    ),
    _alias(
        "trainer.lora.targets",
        "linear layers as the checkpoint names them",
        verl="actor_rollout_ref.model.target_modules",
        prime_rl="trainer.model.lora.target_modules",
        hf="lora_target_modules",
    ),
    # Weights and checkpoints
    _alias(
        "weights.transport",
        "filesystem or nccl",
        verl=f"{_ROLLOUT}.checkpoint_engine.backend {_ROLLOUT}.load_format",
        slime="update-weight-transport update-weight-mode",
        prime_rl="weight_broadcast.type trainer.weight_broadcast weight_broadcast",
        vllm="weight-transfer-config",
    ),
    _alias("weights.timeout_s", "longest wait for one engine to take new weights", prime_rl="weight_broadcast.timeout"),
    _alias(
        "checkpoint.interval",
        "steps between checkpoints",
        verl="trainer.save_freq",
        slime="save-interval",
        prime_rl="ckpt.interval trainer.ckpt.interval",
        hf="save_steps",
    ),
    _alias(
        "checkpoint.keep",
        "number of newest checkpoints that stay",
        verl="trainer.max_actor_ckpt_to_keep",
        prime_rl="ckpt.keep_last ckpt.keep_interval trainer.ckpt.keep_last",
        hf="save_total_limit",
    ),
    _alias(
        "checkpoint.asynchronous",
        "training continues while a checkpoint is written",
        verl=f"{_ACTOR}.checkpoint.async_save",
        slime="async-save",
    ),
    _alias(
        "checkpoint",
        "a run resumes from its newest complete checkpoint by itself, and by `primeslurm resume RUN`",
        verl="trainer.resume_mode trainer.resume_from_path",
        prime_rl="resume.step resume ckpt",
        hf="resume_from_checkpoint save_strategy",
    ),
    # Environments and rewards
    _alias(
        "environments",
        "a list of verifiers environments, each with an id",
        prime_rl="orchestrator.train.source orchestrator.train.env orchestrator.env",
        hf="environment_factory",
    ),
    _alias(
        "environments[].args",
        "options of the environment, for example the path of its data",
        verl="data.train_files data.prompt_key",
        slime="prompt-data input-key label-key metadata-key data-source-path",
        hf="dataset_name dataset_path train_dataset dataset",
    ),
    _alias(
        "environments[].id",
        "rewards are part of an environment, bundled or your own",
        verl="custom_reward_function.path reward_model.reward_manager custom_reward_function reward_model",
        slime="rm-type custom-rm-path rm-url",
        hf="reward_funcs reward_model_path reward_weights",
    ),
    _alias(
        "environments[].workers",
        "worker processes of one environment",
        verl=f"{_ROLLOUT}.agent.num_workers",
        prime_rl="serve.num_workers orchestrator.train.source.num_workers",
    ),
    _alias("environments[].ratio", "share of the groups that this environment gets", prime_rl="source.ratio"),
    _alias(
        "environments[].curriculum",
        "draws examples by difficulty",
        verl="data.sampler.class_path",
        prime_rl="source.curriculum curriculum.sampler",
    ),
    _alias(
        "environments[].shuffle",
        "another order of the examples each epoch",
        verl="data.shuffle",
        slime="rollout-shuffle",
        hf="shuffle_dataset",
    ),
    _alias(
        "environments[].harness",
        "the program that talks to the model",
        verl=f"{_ROLLOUT}.agent.default_agent_loop {_ROLLOUT}.multi_turn.enable {_ROLLOUT}.multi_turn",
        slime="custom-generate-function-path",
        prime_rl="env.agent.harness agent.harness",
        hf="tools max_tool_calling_iterations",
    ),
    _alias(
        "environments[].runtime",
        "what the rollout's programs run in",
        verl="reward_model.sandbox_fusion.url sandbox_fusion",
        prime_rl="env.agent.runtime agent.runtime",
    ),
    _alias(
        "environments[].length_penalty",
        "what long rollouts lose of their reward",
        verl="reward_model.overlong_buffer reward_kwargs.overlong_buffer_cfg",
        prime_rl="algo.length_penalty",
    ),
    # Orchestrator
    _alias(
        "orchestrator.batch_size",
        "rollouts per step (prompts x group_size), not prompts",
        verl=f"data.train_batch_size {_ACTOR}.ppo_mini_batch_size",
        slime="rollout-batch-size global-batch-size",
        prime_rl="orchestrator.token_batch_size",
        hf="generation_batch_size train_batch_size",
    ),
    _alias(
        "orchestrator.group_size",
        "rollouts of one prompt",
        verl=f"{_ROLLOUT}.n",
        slime="n-samples-per-prompt",
        prime_rl="orchestrator.rollouts_per_example",
        vllm="sampling.n",
        hf="num_generations",
    ),
    _alias(
        "orchestrator.advantages",
        "grpo, max_rl, opd, rae or hierarchical_grpo; there is no critic",
        verl="algorithm.adv_estimator algorithm.gamma algorithm.lam critic critic.optim.lr critic.model.path",
        slime="advantage-estimator gamma lambd value-clip",
        prime_rl="orchestrator.algo.type orchestrator.algo orchestrator.advantage algo",
        hf="lam vf_coef value_model_path",
    ),
    _alias(
        "orchestrator.algorithm.function",
        "module:function of your own algorithm",
        slime="custom-advantage-function-path",
        prime_rl="orchestrator.algo.import_path",
    ),
    _alias("orchestrator.opd_reward", "factor of the reward beside the teacher's signal", slime="opd-kl-coef"),
    _alias(
        "orchestrator.max_off_policy_steps",
        "versions that a rollout may be behind; every batch is trained once",
        verl="async_training.staleness_threshold trainer.staleness_threshold actor_rollout_ref.actor.ppo_epochs",
        slime="num-steps-per-rollout update-weights-interval",
        prime_rl="orchestrator.max_async_level orchestrator.async_level",
        hf="num_iterations max_staleness steps_per_generation",
    ),
    _alias(
        "orchestrator.max_inflight_rollouts",
        "most rollouts in flight",
        verl="async_training.max_concurrent_samples",
        slime="sglang-server-concurrency",
        prime_rl="orchestrator.concurrency.max_inflight orchestrator.max_concurrent concurrency.initial_inflight",
        hf="max_inflight_tasks",
    ),
    _alias(
        "orchestrator.oversampling",
        "rollouts that run for each one that a batch needs",
        verl=f"{_ROLLOUT}.over_sample_rate data.gen_batch_size",
        slime="over-sampling-batch-size",
        prime_rl="orchestrator.oversampling_factor",
    ),
    _alias(
        "orchestrator.filters",
        "for example [{type: zero_advantage}], which samples other groups instead",
        verl="algorithm.filter_groups.enable algorithm.filter_groups",
        slime="dynamic-sampling-filter-path rollout-sample-filter-path buffer-filter-path",
        prime_rl="orchestrator.train.filter_zero_advantages filter_zero_advantages",
        hf="mask_truncated_completions",
    ),
    _alias(
        "orchestrator.staleness",
        "how to handle rollouts that get too old",
        slime="partial-rollout mask-offpolicy-in-partial-rollout",
        verl="async_training.partial_rollout",
    ),
    _alias(
        "orchestrator.sampling.temperature",
        "of training rollouts",
        verl=f"{_ROLLOUT}.temperature",
        slime="rollout-temperature",
        prime_rl="orchestrator.train.sampling.temperature",
        hf="temperature",
    ),
    _alias(
        "orchestrator.sampling.max_tokens",
        "new tokens per turn",
        verl="data.max_response_length",
        slime="rollout-max-response-len",
        prime_rl="orchestrator.train.sampling.max_completion_tokens sampling.max_completion_tokens",
        vllm="max_new_tokens",
        hf="max_completion_length max_new_tokens response_length",
    ),
    _alias(
        "orchestrator.sampling.top_p",
        "only 1: training samples from the whole distribution",
        verl=f"{_ROLLOUT}.top_p",
        slime="rollout-top-p",
    ),
    _alias("orchestrator.sampling.top_k", "only -1 or 0", verl=f"{_ROLLOUT}.top_k", slime="rollout-top-k"),
    _alias(
        "orchestrator.rollout_transport",
        "zmq or filesystem",
        slime="rollout-data-transport",
        prime_rl="rollout_transport.type trainer.rollout_transport",
    ),
    # Evaluation
    _alias(
        "evaluation.environments",
        "environments that the policy is evaluated on",
        verl="data.val_files",
        slime="eval-prompt-data eval-config",
        prime_rl="orchestrator.eval.source orchestrator.eval.env orchestrator.eval",
        hf="eval_dataset",
    ),
    _alias(
        "evaluation.interval",
        "steps from one evaluation to the next",
        verl="trainer.test_freq",
        slime="eval-interval",
        prime_rl="orchestrator.eval.interval eval.interval",
        hf="eval_steps eval_strategy",
    ),
    _alias(
        "evaluation.at_start",
        "also evaluate the model before the first step",
        verl="trainer.val_before_train",
        slime="skip-eval-before-train",
        prime_rl="orchestrator.eval.skip_first_step eval.skip_first_step",
        hf="eval_on_start",
    ),
    _alias(
        "evaluation.environments[].examples",
        "tasks of the taskset that are evaluated",
        verl="data.val_batch_size",
        prime_rl="orchestrator.eval.num_examples eval.num_examples",
    ),
    _alias(
        "evaluation.environments[].samples",
        "rollouts of each example, for pass@k",
        verl=f"{_ROLLOUT}.val_kwargs.n",
        slime="n-samples-per-eval-prompt",
        prime_rl="orchestrator.eval.group_size eval.group_size",
    ),
    _alias(
        "evaluation.environments[].sampling",
        "temperature, top_p, top_k and max_tokens of evaluation",
        verl=f"{_ROLLOUT}.val_kwargs",
        slime="eval-temperature eval-top-p eval-top-k eval-max-response-len",
        prime_rl="orchestrator.eval.sampling eval.sampling",
    ),
    # Engines
    _alias(
        "inference.parallel.tp",
        "GPUs per engine",
        verl=f"{_ROLLOUT}.tensor_model_parallel_size",
        slime="rollout-num-gpus-per-engine sglang-tp-size",
        prime_rl="inference.vllm.tensor_parallel_size inference.parallel.tp",
        vllm="tensor-parallel-size",
        hf="vllm_tensor_parallel_size",
    ),
    _alias(
        "inference.parallel.dp",
        "engines of one expert-parallel group; it follows from the nodes",
        verl=f"{_ROLLOUT}.data_parallel_size",
        slime="sglang-dp-size sglang-data-parallel-size",
        prime_rl="inference.vllm.data_parallel_size inference.vllm.data_parallel_size_local",
        vllm="data-parallel-size data-parallel-size-local",
    ),
    _alias(
        "inference.expert_parallel",
        "spread the experts over the engines of a group",
        verl=f"{_ROLLOUT}.expert_parallel_size",
        slime="sglang-ep-size sglang-expert-parallel-size",
        prime_rl="inference.vllm.enable_expert_parallel",
        vllm="enable-expert-parallel",
    ),
    _alias(
        "inference.all2all",
        "how tokens reach their experts",
        slime="sglang-moe-a2a-backend",
        prime_rl="inference.vllm.all2all_backend",
        vllm="all2all-backend",
    ),
    _alias(
        "inference.dbo",
        "overlap communication and computation of two half batches",
        prime_rl="inference.vllm.enable_dbo",
        vllm="enable-dbo",
    ),
    _alias(
        "inference.eplb",
        "move experts between ranks as their load changes",
        slime="sglang-enable-eplb",
        prime_rl="inference.vllm.enable_eplb",
        vllm="enable-eplb",
    ),
    _alias(
        "inference.gpu_memory_utilization",
        "share of a GPU's memory that an engine may use",
        verl=f"{_ROLLOUT}.gpu_memory_utilization",
        slime="sglang-mem-fraction-static",
        prime_rl="inference.vllm.gpu_memory_utilization",
        vllm="gpu-memory-utilization",
        hf="vllm_gpu_memory_utilization",
    ),
    _alias(
        "inference.kv_cache_bytes", "KV cache per GPU in bytes", vllm="kv-cache-memory-bytes num-gpu-blocks-override"
    ),
    _alias(
        "inference.max_num_seqs",
        "requests that an engine runs together",
        verl=f"{_ROLLOUT}.max_num_seqs",
        slime="sglang-max-running-requests",
        prime_rl="inference.vllm.max_num_seqs",
        vllm="max-num-seqs",
    ),
    _alias(
        "inference.max_num_batched_tokens",
        "tokens of one engine step",
        verl=f"{_ROLLOUT}.max_num_batched_tokens",
        slime="sglang-chunked-prefill-size",
        prime_rl="inference.vllm.max_num_batched_tokens",
        vllm="max-num-batched-tokens",
    ),
    _alias(
        "inference.cuda_graphs",
        "CUDA-graph mode",
        verl=f"{_ROLLOUT}.cudagraph_capture_sizes",
        slime="sglang-cuda-graph-bs sglang-disable-cuda-graph",
        vllm="cudagraph-mode compilation-config",
    ),
    _alias(
        "inference.enforce_eager",
        "neither compile nor capture CUDA graphs",
        verl=f"{_ROLLOUT}.enforce_eager",
        prime_rl="inference.vllm.enforce_eager",
        vllm="enforce-eager",
    ),
    _alias(
        "inference.quantization",
        "fp8, as weights are loaded",
        verl=f"{_ROLLOUT}.quantization",
        slime="sglang-quantization",
        prime_rl="inference.vllm.quantization",
        vllm="quantization",
    ),
    _alias("inference.kv_cache_dtype", "auto or fp8", slime="sglang-kv-cache-dtype", vllm="kv-cache-dtype"),
    _alias(
        "inference.deep_gemm",
        "DeepGEMM's kernels for FP8 layers and experts",
        prime_rl="inference.use_deep_gemm",
        vllm="VLLM_USE_DEEP_GEMM",
    ),
    _alias(
        "inference.kv_offload",
        "further tiers of KV cache behind the GPU",
        slime="sglang-enable-hierarchical-cache",
        prime_rl="inference.kv_cache_offload",
        vllm="kv-offloading-size kv-transfer-config cpu-offload-gb swap-space",
    ),
    _alias(
        "inference.kv_offload.cpu.bytes",
        "host memory of each engine's node for KV",
        prime_rl="inference.kv_cache_offload.cpu.num_bytes",
    ),
    _alias(
        "inference.router.type",
        "vllm-router, llm-d or dynamo",
        slime="sglang-router-ip use-slime-router",
        prime_rl="inference.router",
    ),
    _alias(
        "inference.router.policy", "of vllm-router", slime="sglang-router-policy", prime_rl="inference.router.policy"
    ),
    _alias(
        "inference.tool_call_parser",
        "vLLM's parser of tool calls; rollouts need none",
        verl=f"{_ROLLOUT}.multi_turn.format",
        slime="sglang-tool-call-parser",
        prime_rl="inference.vllm.tool_call_parser",
        vllm="tool-call-parser enable-auto-tool-choice",
    ),
    _alias(
        "inference.reasoning_parser",
        "vLLM's parser of thoughts",
        slime="sglang-reasoning-parser",
        prime_rl="inference.vllm.reasoning_parser",
        vllm="reasoning-parser",
    ),
    _alias("inference.env", "environment variables of engines", prime_rl="inference.env_vars"),
    _alias(
        "inference.prefill.env",
        "environment variables of prefill engines",
        prime_rl="inference.deployment.prefill_env_vars prefill_env_overrides",
    ),
    _alias(
        "inference.decode.env",
        "environment variables of decode engines",
        prime_rl="inference.deployment.decode_env_vars decode_env_overrides",
    ),
    _alias(
        "inference.prefill",
        "settings in which prefill engines differ",
        slime="prefill-num-servers",
        prime_rl="inference.deployment.prefill_vllm_overrides",
    ),
    _alias(
        "inference.decode",
        "settings in which decode engines differ",
        prime_rl="inference.deployment.decode_vllm_overrides",
    ),
    _alias(
        "inference.vllm_extra",
        "any other vLLM option, by its long name with underscores",
        verl=f"{_ROLLOUT}.engine_kwargs.vllm {_ROLLOUT}.engine_kwargs",
        prime_rl="inference.vllm",
        vllm="enable-prefix-caching enable-chunked-prefill block-size trust-remote-code rope-scaling",
        hf="vllm_enable_prefix_caching",
    ),
    _alias(
        "inference.start_timeout_s",
        "longest time from an engine's start to its first answer",
        prime_rl="client.wait_for_ready_timeout orchestrator.model.client.wait_for_ready_timeout",
        hf="vllm_server_timeout",
    ),
    # Teacher and SFT
    _alias(
        "teacher.path",
        "a frozen model, with `type: engines`; it is asked by trainer.loss.ref_kl or advantages: opd",
        verl="actor_rollout_ref.ref.model actor_rollout_ref.ref distillation.teacher_model.model_path",
        slime="ref-load opd-teacher-load",
        prime_rl="teacher.model.name teacher_inference",
        hf="ref_model teacher_model_name_or_path",
    ),
    _alias(
        "teacher.base_url",
        "of a teacher with `type: served`",
        slime="opd-teacher-url",
        prime_rl="orchestrator.teacher.client.base_url client.base_url",
        hf="teacher_model_server_url",
    ),
    _alias(
        "sft.data.path",
        "a file of JSON lines, with task: sft",
        verl="data.sft_files",
        prime_rl="sft.data.name data.name",
        hf="dataset_text_field",
    ),
    _alias("sft.batch_size", "sequences per step, with task: sft", prime_rl="sft.data.batch_size data.batch_size"),
    # Nodes
    _alias(
        "deployment.train.nodes",
        "nodes of the trainer; each role has its own number of nodes",
        verl="trainer.nnodes",
        slime="actor-num-nodes",
        prime_rl="deployment.num_train_nodes",
        slurm="nodes ntasks",
        hf="num_machines",
    ),
    _alias(
        "deployment.train.gpus_per_node",
        "GPUs that the trainer uses on each of its nodes",
        verl="trainer.n_gpus_per_node",
        slime="actor-num-gpus-per-node",
        prime_rl="deployment.num_train_gpus",
        slurm="gpus-per-node gpus-per-task gpus",
        hf="num_processes",
    ),
    _alias(
        "deployment.inference.gpus_per_node",
        "GPUs that engines use on each of their nodes",
        slime="rollout-num-gpus num-gpus-per-node",
        prime_rl="deployment.num_infer_gpus deployment.gpus_per_node inference.deployment.gpus_per_node",
    ),
    _alias(
        "deployment.inference.num_replicas",
        "inference replicas, each behind its own router, with `type: multi_node` or `disaggregated`",
        verl="rollout.nnodes",
        slime="sglang-num-engines",
        prime_rl="deployment.num_infer_replicas deployment.num_infer_nodes",
        vllm="api-server-count",
    ),
    _alias(
        "deployment.inference.nodes_per_replica",
        "nodes of one replica, with `type: multi_node`",
        verl=f"{_ROLLOUT}.nnodes",
        prime_rl="inference.deployment.num_nodes",
    ),
    _alias(
        "deployment.inference.type",
        "single_node, multi_node or disaggregated",
        slime="sglang-disaggregation-mode",
        prime_rl="inference.deployment.type inference.deployment inference.use_pd_kv_transfer",
    ),
    _alias(
        "deployment.inference.prefill.nodes_per_replica",
        "with `type: disaggregated`",
        prime_rl="inference.deployment.prefill_nodes_per_replica num_prefill_nodes",
    ),
    _alias(
        "deployment.inference.prefill.num_replicas",
        "groups of prefill nodes in one inference replica",
        prime_rl="inference.deployment.num_prefill_replicas",
    ),
    _alias(
        "deployment.inference.decode.nodes_per_replica",
        "with `type: disaggregated`",
        prime_rl="inference.deployment.decode_nodes_per_replica num_decode_nodes",
    ),
    _alias(
        "deployment.inference.decode.num_replicas",
        "groups of decode nodes in one inference replica",
        prime_rl="inference.deployment.num_decode_replicas",
    ),
    _alias(
        "deployment.layout",
        "het, single or one_node",
        prime_rl="deployment.type",
        hf="use_vllm",
    ),
    _alias(
        "deployment.colocated",
        "trainer and engines share the same GPUs, with `deployment.layout: one_node`",
        verl="actor_rollout_ref.hybrid_engine",
        slime="colocate",
        hf="vllm_mode",
    ),
    # Slurm
    _alias(
        "slurm.train.partition",
        "one for each role (slurm.inference.partition, ...); for all roles, nodes.default.partition of the site file",
        prime_rl="slurm.partition",
        slurm="partition",
    ),
    _alias(
        "site: nodes.default.gres", "name of the generic resource, for example gpu:h200", slurm="gres constraint-gpu"
    ),
    _alias("slurm.time", "time limit of the job, HH:MM:SS or D-HH:MM:SS", slurm="time-limit timelimit walltime"),
    _alias("slurm.account", "the account that pays for the job", slurm="charge-account project-account"),
    _alias("slurm.qos", "quality of service of the job", slurm="quality-of-service qos-name"),
    _alias("slurm.train.constraint", "features that the trainer's nodes must have", slurm="constraint"),
    _alias(
        "slurm.train.nodelist", "nodes that must be in the job, by role", slurm="nodelist", prime_rl="slurm.nodelist"
    ),
    _alias("slurm.train.mem", "memory of each of the trainer's nodes", slurm="mem"),
    _alias("slurm.train.mem_per_cpu", "memory per core on the trainer's nodes", slurm="mem-per-cpu"),
    _alias("slurm.train.mem_per_gpu", "memory per GPU on the trainer's nodes", slurm="mem-per-gpu"),
    _alias(
        "slurm.train.cpus_per_task",
        "cores on each of the trainer's nodes",
        slurm="cpus-per-task cpus-per-gpu ntasks-per-node",
    ),
    _alias("slurm.train.exclusive", "share no node with other jobs, by role", slurm="exclusive"),
    _alias("slurm.train.switches", "most leaf switches under the trainer's nodes", slurm="switches"),
    _alias("slurm.mail.types", "when Slurm writes mail", slurm="mail-type"),
    _alias("slurm.mail.user", "to whom Slurm writes mail", slurm="mail-user"),
    _alias("slurm.checkpoint_signal_s", "seconds before the time limit", slurm="signal"),
    _alias("slurm.time_min", "Slurm may lower the time limit to this", slurm="time-min"),
    _alias(
        "slurm.container", "type pyxis or apptainer, with an image", slurm="container-image container-mounts container"
    ),
    _alias("slurm.extra", "other options of sbatch, one each", slurm="wckey export output error open-mode"),
    _alias(
        "site: prologue",
        "shell lines that run on each node before its processes start",
        prime_rl="slurm.pre_run_command slurm.template_path",
        slurm="prolog task-prolog",
    ),
    _alias(
        "site: env",
        "environment variables of all processes",
        slime="train-env-vars",
        prime_rl="env_vars trainer.env_vars orchestrator.env_vars",
        verl="ray_kwargs.ray_init.runtime_env.env_vars",
    ),
    _alias("site: modules", "modules that are loaded on each node", slurm="module modules"),
    # Logging
    _alias(
        "monitor.wandb.project",
        "Weights & Biases project",
        verl="trainer.project_name",
        slime="wandb-project use-wandb",
        prime_rl="monitors.wandb.project wandb.project monitors.wandb",
        hf="report_to wandb_project",
    ),
    _alias(
        "monitor.wandb.entity",
        "Weights & Biases team or user",
        slime="wandb-team",
        prime_rl="monitors.wandb.entity wandb.entity",
    ),
    _alias(
        "monitor.wandb.mode",
        "online, offline or disabled",
        slime="wandb-mode",
        prime_rl="monitors.wandb.offline wandb.offline",
    ),
    _alias(
        "monitor",
        "tensorboard and wandb; metrics.jsonl is always written",
        verl="trainer.logger",
        slime="use-tensorboard tb-project-name",
        prime_rl="monitors",
        hf="logging_steps",
    ),
    _alias(
        "pass_env",
        "names of variables that processes get from your shell, for example WANDB_API_KEY",
        slime="wandb-key",
        hf="hub_token",
    ),
)
"""All entries, in the order of a recipe's sections."""

VALUE_ALIASES: tuple[ValueAlias, ...] = (
    ValueAlias("task", ("grpo", "ppo", "train", "training", "rlhf", "rlvr", "dpo"), "rl", "asynchronous RL"),
    ValueAlias("task", ("finetune", "fine_tune", "finetuning", "pretrain"), "sft", "the trainer alone"),
    ValueAlias("task", ("inference", "infer", "server"), "serve", "engines and routers alone"),
    ValueAlias("task", ("evaluate", "evaluation", "val"), "eval", "engines and environments of `evaluation`"),
    ValueAlias(
        "trainer.loss.type",
        ("ppo", "grpo", "vanilla", "clip", "dapo", "policy_loss"),
        "grpo_clip",
        "the clipped ratio of PPO and GRPO",
    ),
    ValueAlias(
        "trainer.loss.type", ("default", "prime", "prime-rl"), "dppo", "the default of prime-rl has this name here"
    ),
    ValueAlias("trainer.loss.type", ("minimax", "reinforce", "icepop"), "cispo", "a clipped importance weight"),
    ValueAlias(
        "trainer.loss.type", ("dr_grpo", "bnpo"), "grpo_clip", "with trainer.loss.average: seq_len for Dr. GRPO"
    ),
    ValueAlias(
        "orchestrator.advantages",
        ("gae", "ppo", "reinforce", "reinforce_plus_plus", "rloo", "remax", "gspo", "dr_grpo"),
        "grpo",
        "there is no critic; advantages are relative to a group",
    ),
    ValueAlias(
        "orchestrator.advantages",
        ("opsd", "distill", "on_policy_distillation", "distillation"),
        "opd",
        "with a `teacher`",
    ),
    ValueAlias("orchestrator.advantages", ("maxrl", "maxrl_grpo"), "max_rl", "favours rare success"),
    ValueAlias("trainer.optimizer.type", ("adam", "adamw_torch", "adamw_torch_fused", "fused_adam"), "adamw", "AdamW"),
    ValueAlias("trainer.optimizer.type", ("signsgd", "sign-sgd"), "sign_sgd", "SGD by sign"),
    ValueAlias("trainer.optimizer.schedule", ("constant_with_warmup", "none", "wsd"), "constant", "with warmup_steps"),
    ValueAlias(
        "trainer.parallelism.cp_style",
        ("ring", "ring_attention", "zigzag", "p2p"),
        "allgather",
        "gathers all keys and values",
    ),
    ValueAlias("trainer.parallelism.cp_style", ("a2a", "deepspeed"), "ulysses", "exchanges heads for tokens"),
    ValueAlias("trainer.parallelism.ep_backend", ("deep_ep", "flex"), "deepep", "DeepEP"),
    ValueAlias("trainer.parallelism.ep_backend", ("alltoall", "all2all", "nccl"), "torch", "torch's all-to-all"),
    ValueAlias("trainer.parallelism.activation_checkpointing", ("uniform", "block", "true"), "full", "every layer"),
    ValueAlias("trainer.parallelism.activation_checkpointing", ("false", "off"), "none", "no layer"),
    ValueAlias("trainer.loss.average", ("token-mean", "token_mean"), "tokens", "every trained token counts the same"),
    ValueAlias(
        "trainer.loss.average",
        ("seq-mean-token-mean", "sequence", "sequences"),
        "rollouts",
        "every rollout counts the same",
    ),
    ValueAlias("trainer.loss.average", ("seq-mean-token-sum-norm", "dr_grpo"), "seq_len", "Dr. GRPO"),
    ValueAlias(
        "weights.transport",
        ("broadcast", "nixl", "rdma", "collective"),
        "nccl",
        "trainer ranks send weights to engines",
    ),
    ValueAlias(
        "weights.transport", ("disk", "file", "files", "shared_fs"), "filesystem", "through the shared file system"
    ),
    ValueAlias("model.dtype", ("bf16", "auto"), "bfloat16", "compute dtype"),
    ValueAlias("model.dtype", ("fp32",), "float32", "compute dtype"),
    ValueAlias("model.dtype", ("fp16", "float16", "half"), "bfloat16", "there is no loss scaling for float16"),
    ValueAlias("model.impl", ("transformers", "huggingface"), "hf", "transformers' code"),
    ValueAlias(
        "inference.quantization", ("fp8_per_block", "fp8_block", "float8", "deepgemm_fp8"), "fp8", "blocks of 128 x 128"
    ),
    ValueAlias("inference.kv_cache_dtype", ("fp8_e4m3", "fp8_e5m2", "float8"), "fp8", "vLLM chooses the format"),
    ValueAlias(
        "inference.router.type", ("vllm", "vllm_router", "sglang", "slime"), "vllm-router", "the default router"
    ),
    ValueAlias("inference.router.type", ("llmd", "llm_d"), "llm-d", "llm-d's router"),
    ValueAlias(
        "inference.all2all", ("deepep", "deepep_ht"), "deepep_high_throughput", "decode engines: deepep_low_latency"
    ),
    ValueAlias("inference.all2all", ("naive", "allgather"), "allgather_reducescatter", "the default"),
    ValueAlias(
        "deployment.inference.type",
        ("pd", "p/d", "disagg", "prefill_decode"),
        "disaggregated",
        "separate prefill and decode engines",
    ),
    ValueAlias("deployment.inference.type", ("single", "local"), "single_node", "all engines on one node"),
    ValueAlias("deployment.inference.type", ("multi", "distributed"), "multi_node", "engines on several nodes"),
    ValueAlias(
        "deployment.layout",
        ("colocate", "colocated", "hybrid", "hybrid_engine", "single_node"),
        "one_node",
        "all roles share one node; with `deployment.colocated: true` also the same GPUs",
    ),
    ValueAlias("deployment.layout", ("multi_node", "heterogeneous", "hetjob"), "het", "one Slurm component per role"),
    ValueAlias("orchestrator.concurrency", ("fixed", "constant"), "static", "always max_inflight_rollouts"),
    ValueAlias("orchestrator.rollout_transport", ("file", "disk"), "filesystem", "through the shared file system"),
    ValueAlias("orchestrator.rollout_transport", ("ray", "tcp", "object_store"), "zmq", "over the network"),
    ValueAlias("monitor.wandb.mode", ("dryrun", "local"), "offline", "synchronise later"),
)
"""Values of choices, for `is not a valid choice`."""
