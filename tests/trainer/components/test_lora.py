"""LoRA: only adapters are trained and saved, policies have them merged, and PEFT can load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from primeslurm.models import bundled, capabilities, family_of, lora_targets, model_builder
from primeslurm.models.hf_config import shape_of
from primeslurm.nn import compat
from primeslurm.plan.estimates.trainer_memory import lora_parameters
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Checkpoint
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.checkpoints.export import export
from primeslurm.trainer.components import lora
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer.filesystem import MANIFEST
from tests.trainer.conftest import SEQ_LEN, make_batch, make_recipe, make_timer, published
from tests.trainer.families import BY_NAME, CASES, Case, reference_of, write

ADAPTED = [case for case in CASES if capabilities(case.config().model_type, "auto").lora]
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def recipe_of(model: Path, **options: Any) -> Recipe:
    """Return a LoRA recipe with a high learning rate."""
    return make_recipe(model, trainer={"optimizer": {"lr": 2e-2}, "lora": {"rank": 8, "alpha": 16.0, **options}})


def learner_of(recipe: Recipe, world: World) -> TrainStep:
    return TrainStep(build(recipe, world), recipe, world)


def train(train_step: TrainStep, directory: Path, *steps: int) -> list[float]:
    timer = make_timer(directory)
    return [train_step.train(make_batch(step), timer)["loss"] for step in steps]


def state_of(train_step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: lora.whole(t).clone() for name, t in train_step.policy.model.state_dict().items()}


def whole_logits(policy: PolicyModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = policy.logits(tokens, torch.arange(tokens.shape[1])[None])[0]
    return logits


@pytest.fixture(params=["dense", "moe"])
def model(request: pytest.FixtureRequest, dense_model: Path, moe_model: Path) -> Path:
    return dense_model if request.param == "dense" else moe_model


def test_only_adapters_are_trained(moe_model: Path, world: World, tmp_path: Path) -> None:
    train_step = learner_of(recipe_of(moe_model), world)
    before = state_of(train_step)
    train(train_step, tmp_path, 1, 2)
    after = state_of(train_step)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) != lora.is_adapter(name), name


@pytest.mark.parametrize("case", ADAPTED, ids=lambda case: case.name)
def test_published_weights_have_adapters_merged(case: Case, world: World, tmp_path: Path) -> None:
    model = write(case, tmp_path / "model")
    policy = build(recipe_of(model), world)
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    untrained = whole_logits(policy, tokens)
    reference = reference_of(case).from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        assert (untrained - reference(tokens).logits).abs().max() < case.tolerance, "a fresh adapter changes nothing"
        for name, parameter in policy.model.named_parameters():
            assert parameter.requires_grad == lora.is_adapter(name)
            if name.endswith(lora.B):
                parameter.normal_(std=0.02)
    adapted = whole_logits(policy, tokens)
    assert (adapted - untrained).abs().max() > 0.1
    directory = Publisher(policy, tmp_path, Encoding(torch.float32), 1, world).publish(2)
    merged = reference_of(case).from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        assert (merged(tokens).logits - adapted).abs().max() < 2 * case.tolerance
    assert not (directory / "adapter").exists()


def test_checkpoint_holds_only_adapters_and_resumes(moe_model: Path, world: World, tmp_path: Path) -> None:
    recipe = recipe_of(moe_model)
    train_step = learner_of(recipe, world)
    train(train_step, tmp_path, 1)
    timer = make_timer(tmp_path)
    Checkpoints(tmp_path, 1, Checkpoint(), world, None).finish(1, train_step, timer)
    reader = dcp.FileSystemReader(tmp_path / "checkpoints" / "step_000001" / "trainer")
    saved = {name for name in reader.read_metadata().state_dict_metadata if not name.startswith("scheduler")}
    assert saved and all("_lora_" in name or "param_groups" in name for name in saved)
    assert any(name.startswith("model.") for name in saved) and any(name.startswith("optimizer.") for name in saved)

    resumed = learner_of(recipe, world)
    assert Checkpoints(tmp_path, 2, Checkpoint(), world, None).restore(resumed) == 1
    assert train(resumed, tmp_path, 2, 3) == train(train_step, tmp_path, 2, 3)


def test_adapter_is_saved_in_peft_format(moe_model: Path, world: World, tmp_path: Path) -> None:
    train_step = learner_of(recipe_of(moe_model, save_adapter=True), world)
    train(train_step, tmp_path, 1)
    directory = Publisher(train_step.policy, tmp_path, Encoding(torch.float32), 1, world).publish(1)
    config = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 16.0)
    assert set(config["target_modules"]) == ATTENTION | {"gate_proj", "up_proj", "down_proj"}
    adapter = load_file(directory / "adapter" / "adapter_model.safetensors")
    base = load_file(moe_model / "model.safetensors")
    merged = published(tmp_path, 1)
    # 4 of attention, 3 of each of 8 experts, in 2 layers; each an A and a B
    assert len(adapter) == 2 * (4 + 3 * 8) * 2
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            change = adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"] * 2.0
            torch.testing.assert_close(merged[name], weight + change, atol=1e-6, rtol=1e-5, msg=name)
            assert change.any()
        else:
            assert torch.equal(merged[name], weight), name


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_stacked_experts_have_stacked_adapters(name: str, world: World, tmp_path: Path) -> None:
    case = BY_NAME[name]
    model = write(case, tmp_path / "model")
    train_step = learner_of(recipe_of(model, save_adapter=True), world)
    train(train_step, tmp_path, 1)
    directory = Publisher(train_step.policy, tmp_path, Encoding(torch.float32), 1, world).publish(1)
    config = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    assert "o_proj" in config["target_modules"] and not {"experts", "base_layer"} & set(config["target_modules"])
    adapter = load_file(directory / "adapter" / "adapter_model.safetensors")
    # transformers has experts stacked, [experts, out, in]
    base, merged = (reference_of(case).from_pretrained(d, dtype=torch.float32).state_dict() for d in (model, directory))
    for layer in (0, 1):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        for weight, module in (("gate_up_proj", f"{experts}.base_layer"), ("down_proj", experts)):
            a, b = (adapter.pop(f"base_model.model.{module}.lora_{factor}.weight") for factor in "AB")
            rank = config["rank_pattern"].get(f"experts.{weight}", config["r"])
            alpha = config["alpha_pattern"].get(f"experts.{weight}", config["lora_alpha"])
            assert (a.shape[0], b.shape[1]) == (8 * rank, 8 * rank)
            pairs = b.unflatten(1, (rank, 8)), a.unflatten(0, (8, rank))
            change = torch.einsum("ore,eri->eoi", *pairs) * alpha / rank
            weights_before, weights_after = (state[f"{experts}.{weight}"] for state in (base, merged))
            torch.testing.assert_close(weights_after, weights_before + change, atol=1e-6, rtol=1e-5)
            assert change.flatten(1).any(1).all(), "every expert has learned"
    assert not [name for name in adapter if ".experts." in name]


def test_only_targets_get_an_adapter(moe_model: Path, world: World) -> None:
    adapted = {
        name for name in build(recipe_of(moe_model, targets=["o_proj"]), world).model.state_dict() if "lora" in name
    }
    assert adapted == {f"layers.{i}.attention.wo.weight_lora_{x}" for i in (0, 1) for x in "ab"}


def test_unknown_targets_are_rejected_together(dense_model: Path, world: World) -> None:
    with pytest.raises(ValueError, match="experts: this model has no layers") as caught:
        build(recipe_of(dense_model, targets=["experts", "q_prj", "o_proj"]), world)
    assert "targets = q_prj: this model has no layers of that name (did you mean q_proj? valid: down_proj, gate" in str(
        caught.value
    )
    assert "lm_head" not in str(caught.value)


def test_families_declare_their_lora_targets() -> None:
    built: dict[str, set[str]] = {}
    for case in ADAPTED:
        spec = model_builder.spec(case.config(), SEQ_LEN, "flex")
        compat.replace_modules(spec.model)
        with torch.device("meta"):
            model = spec.model.build()
        family = family_of(case.config().model_type)
        assert family is not None
        targets = lora._targets(model, spec.state_dict_adapter(spec.model, None)).values()
        built.setdefault(family.name, set()).update(targets)
        assert family.lora_targets >= set(targets) & lora_targets(), case.name
    for name, layers in built.items():
        assert next(f for f in bundled() if f.name == name).lora_targets <= layers, name


def test_planned_adapter_parameters_match_the_model(model: Path, world: World) -> None:
    policy = build(recipe_of(model), world)
    shape = shape_of(json.loads((model / "config.json").read_text()))
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert trained == lora_parameters(shape, 8)


def test_adapters_are_initialized_from_the_seed(moe_model: Path, world: World) -> None:
    first, again = (state_of(learner_of(recipe_of(moe_model), world)) for _ in range(2))
    other = make_recipe(moe_model, seed=1, trainer={"lora": {"rank": 8}})
    different = {n: lora.whole(t) for n, t in build(other, world).model.state_dict().items()}
    drawn = [name for name in first if name.endswith(lora.A)]
    for name in drawn:
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], different[name])
        assert not first[name.removesuffix(lora.A) + lora.B].any()
    assert len({float(first[name].flatten()[0]) for name in drawn}) == len(drawn), "no two are alike"


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "qwen3_vl_moe", "llama-tied"])
def test_exported_checkpoint_equals_merged_weights(name: str, world: World, tmp_path: Path) -> None:
    recipe = recipe_of(write(BY_NAME[name], tmp_path / "model"))
    train_step = learner_of(recipe, world)
    train(train_step, tmp_path, 1)
    Checkpoints(tmp_path, 1, Checkpoint(), world, None).finish(1, train_step, make_timer(tmp_path))
    export(recipe, checkpoints.step_dir(tmp_path, 1), tmp_path / "out")
    Publisher(train_step.policy, tmp_path, Encoding(torch.float32), 1, world).publish(1)
    merged = published(tmp_path, 1)
    exported = {key: t for file in (tmp_path / "out").glob("*.safetensors") for key, t in load_file(file).items()}
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == stored.keys()
    changed = {key for key, tensor in stored.items() if not torch.equal(exported[key], tensor)}
    assert any("mlp" in key for key in changed) and any("o_proj" in key for key in changed)
    for key in exported.keys() & merged.keys():  # published experts may be split, where stored ones are stacked
        torch.testing.assert_close(exported[key], merged[key], atol=1e-6, rtol=1e-5, msg=key)


def test_only_the_adapter_is_published_for_engines_that_apply_it(
    dense_model: Path, world: World, tmp_path: Path
) -> None:
    train_step = learner_of(recipe_of(dense_model), world)
    train(train_step, tmp_path, 1)
    whole, only = (
        Publisher(train_step.policy, tmp_path / name, Encoding(torch.float32), 1, world, name == "adapter")
        for name in ("whole", "adapter")
    )
    merged, directory = load_file(next(whole.publish(1).glob("model-*"))), only.publish(1)
    assert {path.name for path in directory.iterdir()} == {MANIFEST, "adapter_config.json", "adapter_model.safetensors"}
    adapter, base = load_file(directory / "adapter_model.safetensors"), load_file(dense_model / "model.safetensors")
    assert len(adapter) == 2 * 7 * 2  # A and B of 7 projections in 2 layers
    for name, a in adapter.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            change = adapter[name.replace(".lora_A.", ".lora_B.")] @ a * 16.0 / 8
            torch.testing.assert_close(merged[weight], base[weight] + change, atol=1e-6, rtol=1e-5, msg=name)
    assert only.is_sound(1) and not Publisher(
        train_step.policy, tmp_path / "adapter", Encoding(torch.float32), 1, world
    ).is_sound(1), "a resumed run that merges publishes the version again"
