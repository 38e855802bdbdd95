"""After an update, an engine of any family has exactly the weights with which it could have started.

Models are built as in an engine worker, but not run, because vLLM has no CPU kernels for some families.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import DeepseekV3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.layers.fused_moe import config as experts_config
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from primeslurm.inference.plugin import register
from primeslurm.inference.weight_receivers.experts import held_experts
from primeslurm.inference.weight_receivers.filesystem_receiver import FilesystemTransferEngine
from primeslurm.inference.weight_receivers.layerwise import PolicyError
from primeslurm.models import model_types
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.weight_transfer.catalogue import stacked
from tests.trainer.conftest import SEQ_LEN, make_recipe
from tests.trainer.families import BY_NAME, CASES, Case, write, write_drafting

pytestmark = pytest.mark.engine
SELECTION: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
RELEASED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v3": SELECTION,
    "deepseek_v32": SELECTION,
    "glm_moe_dsa": SELECTION | {"index_topk_pattern": "FSSF"},
    "minimax_m2": {"rotary_dim": 8, "use_routing_bias": True, "scoring_func": "sigmoid"},
}
"""Config values of released models that transformers does not write by default."""
NEED_TORCHVISION = {name for name in model_types() if name.startswith(("qwen3_5", "qwen3_vl"))}
NOT_COMPARED = ("kimi_k2", "kimi_k25")
"""Families that equal DeepSeek-V3 under another name."""
DRAFTING = [
    pytest.param(name, marks=pytest.mark.campaign) if name.startswith(("deepseek", "glm_moe")) else name
    for name, able in model_types().items()
    if able.draft_layer
]


class Gpu:
    """A platform that supports all kinds of experts."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == "is_xpu" else getattr(current_platform, name)


@pytest.fixture(scope="module", autouse=True)
def worker(world: World) -> Iterator[None]:
    """Make this process the only worker, which builds models without running them."""
    register()
    end = torch.distributed.destroy_process_group
    backend_of = CpuPlatform.get_attn_backend_cls

    def dense(backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        # On CPUs with AMX vLLM would choose kernels that only support the sizes of released models.
        wanted = AttentionBackendEnum.CPU_MLA if attn_selector_config.use_mla else backend
        return backend_of(wanted, attn_selector_config._replace(use_sparse=False), num_heads)

    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        patch.setattr(CpuPlatform, "get_attn_backend_cls", staticmethod(dense))
        patch.setattr(experts_config, "current_platform", Gpu())
        for supports in ("_supports_no_act_and_mul", "_supports_activation"):
            patch.setattr(CPUUnquantizedExperts, supports, lambda *_: True)
        # vLLM would end all process groups together with its own, and other tests use one.
        patch.setattr(torch.distributed, "destroy_process_group", lambda group=None: group and end(group))
        parallel_state.init_distributed_environment(1, 0, backend="gloo")
        parallel_state.initialize_model_parallel()
        gc.freeze()  # vLLM collects garbage around every load; with all imports that would take a second each time
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture(autouse=True)
def own_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent vLLM from treating DeepSeek-V3.2's config as DeepSeek-V3's."""
    monkeypatch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", CONFIG_MAPPING._extra_content.copy())


def checkpoint(family: str, directory: Path, write: Callable[[Case, Path], Path] = write) -> dict[str, torch.Tensor]:
    """Write a tiny checkpoint, and return its tensors."""
    (case,) = (case for case in CASES if case.name == family)
    write(case, directory)
    config = directory / "config.json"
    settings = json.loads(config.read_text()) | RELEASED.get(family, {})
    settings.get("text_config", settings).setdefault("norm_topk_prob", True)
    config.write_text(json.dumps(settings))
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def make_engine(model: Path, **options: Any) -> FilesystemTransferEngine:
    """Return a weight-transfer engine as in a worker."""
    arguments = EngineArgs(model=str(model), dtype="float32", enforce_eager=True, max_model_len=256, **options)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        return FilesystemTransferEngine(None, config, torch.device("cpu"), get_model(vllm_config=config))


def update(engine: FilesystemTransferEngine, tensors: dict[str, torch.Tensor], in_stacks: bool) -> None:
    """Update the engine, with the tensors of a trainer or of files."""
    held = held_experts(engine.model, enable_eplb=False)
    sent = (pair for item in stacked(tensors.items()) for pair in held.loadable(item))
    with set_current_vllm_config(engine.vllm_config):
        engine.start_weight_update()
        engine.load(sent if in_stacks else iter(tensors.items()))
        engine.finish_weight_update()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that derive from the checkpoint. Packed matrices are represented by a product."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("W_") and isinstance(value, torch.Tensor):  # matrices of multi-head latent attention
                tensors[f"{name}.{key}"] = value
        if hasattr(module, "cpu_linear"):
            width = module.embedding_dim if hasattr(module, "embedding_dim") else module.input_size
            tensors[f"{name}()"] = module.cpu_linear(torch.arange(1.0, width + 1)[None], module.weight, None)
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.numel()}


def skip_without_torchvision(family: str) -> None:
    if family in NEED_TORCHVISION:
        pytest.importorskip("torchvision", reason="vLLM's models that see images need it", exc_type=ImportError)


@pytest.mark.parametrize("family", sorted(model_types().keys() - NOT_COMPARED))
def test_update_equals_a_fresh_start_for_every_family(family: str, tmp_path: Path) -> None:
    skip_without_torchvision(family)
    first = checkpoint(family, tmp_path)
    engine = make_engine(tmp_path)
    begun_with = weights(engine.model)

    update(engine, {name: tensor + 0.5 for name, tensor in first.items()}, in_stacks=True)
    second = weights(engine.model)
    assert second.keys() == begun_with.keys()
    assert [name for name, tensor in second.items() if torch.equal(tensor, begun_with[name])] == []

    update(engine, first, in_stacks=False)
    third = weights(engine.model)
    assert [name for name, tensor in third.items() if not torch.equal(tensor, begun_with[name])] == []


def make_drafting_engine(model: Path) -> FilesystemTransferEngine:
    """Return the same for an engine with method mtp, whose draft layer shares embedding and head."""
    engine = make_engine(model, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    config = engine.vllm_config
    with set_current_vllm_config(config):
        drafter: Any = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    policy = getattr(engine.model, "language_model", engine.model)
    drafter.model.embed_tokens = policy.model.embed_tokens
    if hasattr(drafter, "lm_head"):
        drafter.lm_head = policy.lm_head
    else:
        for layer in drafter.model.layers.values():
            layer.shared_head.head = policy.lm_head
    engine.draft_layers = drafter
    return engine


@pytest.mark.parametrize("family", DRAFTING)
def test_update_with_a_draft_layer_equals_a_fresh_start(family: str, tmp_path: Path) -> None:
    skip_without_torchvision(family)
    first = checkpoint(family, tmp_path, write_drafting)
    engine = make_drafting_engine(tmp_path)
    drafter = engine.draft_layers
    assert drafter is not None
    begun_with = weights(drafter)
    shifted = {name: tensor + 0.5 for name, tensor in first.items()}

    drafted = "mtp." if family in NEED_TORCHVISION else "model.layers.2."
    policy = {name: tensor for name, tensor in shifted.items() if not name.startswith(drafted)}
    update(engine, policy, in_stacks=True)
    shared = ("model.embed_tokens", "model.layers.2.shared_head.head", "lm_head")
    kept = {name for name, tensor in weights(drafter).items() if torch.equal(tensor, begun_with[name])}
    assert kept == {name for name in begun_with if not name.startswith(shared)}

    for lacking in ("eh_proj.weight", "fc.weight", "mlp.experts.1.up_proj.weight"):
        some = {n: t for n, t in shifted.items() if not (n.startswith(drafted) and n.endswith(lacking))}
        if len(some) < len(shifted):
            with pytest.raises(PolicyError, match="lacks 1 parameters of draft layers"):
                update(engine, some, in_stacks=False)
    update(engine, shifted, in_stacks=True)
    second = weights(drafter)
    assert [name for name, tensor in second.items() if torch.equal(tensor, begun_with[name])] == []
    update(engine, first, in_stacks=False)
    third = weights(drafter)
    assert third.keys() == begun_with.keys()
    assert [name for name, tensor in third.items() if not torch.equal(tensor, begun_with[name])] == []


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text-tied", "qwen3_5_moe"])
@torch.no_grad()
def test_draft_layer_computes_as_in_the_trainer(family: str, world: World, tmp_path: Path) -> None:
    """Only the attention kernel is not vLLM's: it would need a KV cache."""
    skip_without_torchvision(family.removesuffix("-tied"))
    path = write_drafting(BY_NAME[family], tmp_path)
    recipe = make_recipe(path, trainer={"draft_layer": {}})
    step = TrainStep(build(recipe, world), recipe, world)
    training, head = step.draft_training, step.policy.model.lm_head
    assert training is not None
    hidden: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LEN)[None]
    step.policy.logits(tokens, positions)
    ours = head(training.hidden(positions))[0, :-1]

    engine = make_drafting_engine(path)
    drafter: Any = engine.draft_layers
    (layer,) = (module for module in drafter.modules() if isinstance(module, attention.Attention))

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (-1, layer.head_size)).transpose(0, 1) for each in heads)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)

    layer.forward = attend
    with set_current_vllm_config(engine.vllm_config), set_forward_context(None, engine.vllm_config):
        theirs = drafter.compute_logits(drafter(tokens[0, 1:], positions[0, :-1], hidden[0][0, :-1]))
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2"])
def test_policy_may_lack_attention_scales(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model built from an FP8 checkpoint has these scales. Here only its attention is FP8, as CPUs support."""
    make = attention._init_kv_cache_quant
    monkeypatch.setattr(attention, "_init_kv_cache_quant", lambda layer, _, prefix: make(layer, Fp8Config(), prefix))
    first = checkpoint(family, tmp_path)
    engine = make_engine(tmp_path)
    begun_with = weights(engine.model)
    update(engine, {name: tensor + 0.5 for name, tensor in first.items()}, in_stacks=True)
    update(engine, first, in_stacks=True)
    third = weights(engine.model)
    assert third.keys() == begun_with.keys()
    assert [name for name, tensor in third.items() if not torch.equal(tensor, begun_with[name])] == []


def test_laguna_loads_its_selection_bias(tmp_path: Path) -> None:
    first = checkpoint("laguna", tmp_path)
    (bias,) = (tensor for name, tensor in first.items() if name.endswith("e_score_correction_bias"))
    engine = make_engine(tmp_path)
    (experts,) = (module for name, module in engine.model.named_modules() if name.endswith(".routed_experts"))
    assert torch.equal(experts.e_score_correction_bias, bias)
    assert bias.any()


def test_gpt_oss_refuses_a_policy_with_gaps_and_takes_the_next(tmp_path: Path) -> None:
    first = checkpoint("gpt_oss", tmp_path)
    engine = make_engine(tmp_path)
    begun_with = weights(engine.model)
    for part in ("1.mlp.experts.down_proj", "0.mlp.experts.gate_up_proj_bias", "1.self_attn.sinks"):
        absent = f"model.layers.{part}"
        with pytest.raises(PolicyError, match="the policy lacks"):
            update(engine, {name: tensor + 0.5 for name, tensor in first.items() if name != absent}, in_stacks=True)
    update(engine, first, in_stacks=True)
    third = weights(engine.model)
    assert [name for name, tensor in begun_with.items() if not torch.equal(tensor, third[name])] == []
