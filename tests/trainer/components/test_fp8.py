"""Block-scaled FP8: quantization, products and gradients against float64, and models in FP8."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import grouped_mm
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts

from primeslurm.models import capabilities
from primeslurm.nn.kernels.fp8.backend import Emulated
from primeslurm.nn.kernels.fp8.blocks import BLOCKS, ROWS, Groups, quantize, quantize_groups, quantize_groups_transposed
from primeslurm.nn.layers import fp8
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.matrix_products import adapt
from primeslurm.trainer.components.router_replay import ReplayRouter
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from tests.support import block_fp8 as exact
from tests.support.block_fp8 import OFFSETS, matrix, relative_error
from tests.trainer.conftest import SEQ_LEN, make_recipe
from tests.trainer.families import BY_NAME, CASES, Case, write

# Half a unit in the last place of e4m3's three mantissa bits; below its smallest normal number, of that number's.
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10


def rounding(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the maximum rounding error of each quantized value."""
    scales = replace(quantize(values, block), data=torch.ones_like(values).to(torch.float8_e4m3fn))
    return torch.maximum(values.double().abs() * RELATIVE, scales.values(torch.float64) * ABSOLUTE)


TOKENS = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(SEQ_LEN)[None]
IN_FP8 = [c for c in CASES if "-" not in c.name and capabilities(c.config().model_type, "auto").fp8]
KEPT = {"lm_head", "router.gate", "shared_experts.gate", "indexer.wk", "indexer.weights_proj"} | {
    f"delta_net.in_proj_{name}" for name in "ab"
}
# A selection of keys cannot be replayed, so all of them are selected.
SIZES = {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 144, "index_topk": SEQ_LEN}


@pytest.mark.parametrize("shape", [(256, 384), (200, 130)])
@pytest.mark.parametrize("block", [ROWS, BLOCKS])
def test_each_block_is_scaled_by_its_largest_value(block: tuple[int, int], shape: tuple[int, int]) -> None:
    values = matrix(*shape)
    values[:128, :128] = 0
    actual = quantize(values, block)
    assert actual.scales.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    for i in range(actual.scales.shape[0]):
        for j in range(actual.scales.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scale = max(values[part].float().abs().max(), torch.tensor(1e-30)) / 448
            assert actual.scales[i, j] == scale
            assert torch.equal(
                actual.data[part].float(), (values[part].float() * (1 / scale)).to(actual.data.dtype).float()
            )
    assert ((actual.values(torch.float64) - values.double()).abs() <= rounding(values, block)).all()
    view = quantize(values.T.contiguous().T, block)
    assert view.data.is_contiguous() and torch.equal(view.values(), actual.values())


def test_tiny_gradients_keep_their_precision() -> None:
    values = matrix(128, 128)
    small = quantize(values.float() * 2.0**-40, ROWS)
    assert torch.equal(small.values() * 2.0**40, quantize(values, ROWS).values())


def test_emulated_products_match_dequantized_operands() -> None:
    rows, weight, left, right = exact.operands("cpu")
    product = Emulated().product(rows, weight)
    assert relative_error(product, rows.values(torch.float64) @ weight.values(torch.float64).T) < 1e-6
    outer = Emulated().outer(left, right)
    assert relative_error(outer, left.values(torch.float64) @ right.values(torch.float64).T) < 1e-6


def test_groups_are_padded_to_whole_blocks() -> None:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    groups = Groups.of(offsets)
    assert groups.sizes == [128, 0, 256, 0, 256] and groups.bounds.tolist() == [0, 128, 128, 384, 384, 640]
    assert groups is Groups.of(offsets)
    padding = [*range(5, 128), *range(328, 384)]
    assert groups.sources.eq(-1).nonzero().flatten().tolist() == padding
    assert groups.owners.eq(-1).nonzero().flatten().tolist() == padding
    assert groups.sources[groups.places].tolist() == list(range(OFFSETS[-1]))
    assert groups.owners[groups.places].tolist() == [0] * 5 + [2] * 200 + [4] * 256


def test_groups_are_quantized_separately() -> None:
    groups, rows = exact.groups_and_rows(200, "cpu")
    straight, flat = quantize_groups(rows, groups), quantize_groups_transposed(rows, groups)
    assert torch.equal(straight.values()[groups.places], quantize(rows, ROWS).values())
    assert not straight.values()[groups.owners < 0].any()
    data, blocks = flat.data.float(), flat.scales
    for part in (rows[:5], rows[5:205], rows[205:]):
        padded = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % 128))
        expected = quantize(padded.T.contiguous(), ROWS)
        assert torch.equal(data[: padded.numel()], expected.data.float().flatten())
        assert torch.equal(blocks[:, : len(padded) // 128], expected.scales)
        data, blocks = data[padded.numel() :], blocks[:, len(padded) // 128 :]
    assert not data.numel() and not blocks.numel()


def test_emulated_grouped_products_with_uneven_and_empty_groups() -> None:
    groups, rows = exact.groups_and_rows(256, "cpu")
    a, b = quantize_groups(rows, groups), quantize(matrix(5, 128, 256, seed=1), BLOCKS)
    product = Emulated().grouped_product(a, b, groups)[groups.places]
    assert relative_error(product, exact.exact_grouped_product(a, b, groups)) < 1e-6
    upstream = matrix(OFFSETS[-1], 128, seed=2)
    left, right = (quantize_groups_transposed(t, groups) for t in (upstream, rows))
    outer = Emulated().grouped_outer(left, right, groups)
    assert relative_error(outer, exact.exact_grouped_outer(upstream, rows, groups)) < 1e-6
    assert not outer[1].any() and not outer[3].any()


def test_no_rows() -> None:
    groups = Groups.of(torch.zeros(3, dtype=torch.int32))
    rows = torch.empty(0, 128, requires_grad=True)
    weight = torch.ones(3, 128, 128, requires_grad=True)
    fp8.grouped_product(rows, weight, torch.zeros(3, dtype=torch.int32)).sum().backward()
    assert groups.sizes == [0, 0, 0] and weight.grad is not None and not weight.grad.any()


def test_linear_layer_and_gradients_are_within_rounding() -> None:
    x, w = matrix(2, 100, 256).float().requires_grad_(), matrix(128, 256, seed=1).float().requires_grad_()
    gradient = matrix(2, 100, 128, seed=2).float()
    out = fp8.linear_product(x, w)
    out.backward(gradient)
    rows, upstream = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 56)) for t in (upstream, rows)]
    for actual, (a, a_block), (b, b_block) in (
        (out.detach().flatten(0, 1), (rows, ROWS), (w.detach(), BLOCKS)),
        (x.grad.flatten(0, 1), (upstream, ROWS), (w.detach().T, BLOCKS)),
        (w.grad, (padded[0].T, ROWS), (padded[1].T, ROWS)),
    ):
        da, db = rounding(a.contiguous(), a_block), rounding(b.contiguous(), b_block)
        a, b = a.double(), b.double()
        bound = a.abs() @ db.T + da @ b.abs().T + da @ db.T
        difference = (actual.double() - a @ b.T).abs()
        assert (difference <= bound * (1 + 1e-5)).all()
        assert relative_error(actual, a @ b.T) < 0.05


def test_grouped_products_and_gradients_are_near_float32() -> None:
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    actual, expected = [], []
    for product, results in ((fp8.grouped_product, actual), (_grouped, expected)):
        rows, weight = matrix(OFFSETS[-1], 256).float(), matrix(5, 128, 256, seed=1).float()
        rows.requires_grad_(), weight.requires_grad_()
        out = product(rows, weight, offsets)
        out.backward(matrix(OFFSETS[-1], 128, seed=2).float())
        results += [out.detach(), rows.grad, weight.grad]
    for mine, exactly in zip(actual, expected, strict=True):
        assert 1e-4 < relative_error(mine, exactly.double()) < 0.05


def _grouped(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return grouped_mm(rows, weight.mT, offs=offsets)


def widened(case: Case) -> Case:
    """Return the case with partial blocks at the matrix edges, and weights too small to magnify rounding."""

    def config() -> Any:
        made = case.config()
        text = made.get_text_config()
        text.initializer_range = 0.02
        for name, size in SIZES.items():
            if hasattr(text, name):
                setattr(text, name, size)
        return made

    return replace(case, config=config)


def run(policy: PolicyModel, routed: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of a row, and gradients of a function of them."""
    logits = policy.logits(TOKENS, POSITIONS, routed=routed)[0]
    logits.logsumexp(-1).sum().backward()
    reached = ((name, p.grad) for name, p in policy.model.named_parameters() if p.grad is not None)
    return logits.detach(), {name: gradient.to_local().double() for name, gradient in reached}


def routes(policy: PolicyModel) -> torch.Tensor:
    """Return the experts that a policy chooses, as `logits` takes them."""
    taken = torch.zeros(1, SEQ_LEN, len(policy.model.layers), 2, dtype=torch.uint8)

    def note(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        taken[:, :, router.layer] = output[1]

    hooks = [m.register_forward_hook(note) for m in policy.model.modules() if isinstance(m, ReplayRouter)]
    with torch.no_grad():
        policy.logits(TOKENS, POSITIONS)
    for hook in hooks:
        hook.remove()
    return taken


def is_exact(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    """Forward hook: assert that the output is the product of the quantized operands."""
    rows, weight = (quantize(t, block) for t, block in ((inputs[0].detach(), ROWS), (module.weight.detach(), BLOCKS)))
    exactly = rows.values(torch.float64) @ weight.values(torch.float64).T
    if module.bias is not None:
        exactly = exactly + module.bias.detach().double()
    assert relative_error(output.detach(), exactly) < 1e-6


class Grouped:
    """Wraps `fp8.grouped_product`, and asserts that each result is the product of the quantized operands."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.products = 0
        self._real = fp8.grouped_product
        patch.setattr(fp8, "grouped_product", self)

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        product = self._real(rows, weight, offsets)
        a, b = quantize(rows.detach(), ROWS).values(torch.float64), quantize(weight.detach(), BLOCKS)
        parts = zip(a.tensor_split(offsets[:-1].tolist()), b.values(torch.float64), strict=True)
        exactly = torch.cat([part @ matrix.T for part, matrix in parts])
        assert relative_error(product.detach(), exactly) < 1e-6
        self.products += 1
        return product


@pytest.mark.parametrize("case", IN_FP8, ids=lambda case: case.name)
def test_model_computes_the_same_layers_in_fp8_as_engines(
    case: Case, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(widened(case), tmp_path)
    replays = capabilities(case.config().model_type, "auto").router_replay
    plain = build(make_recipe(model, trainer={"router_replay": replays}), world)
    routed = routes(plain) if replays else None
    logits, gradients = run(plain, routed)
    policy = build(make_recipe(model, trainer={"router_replay": replays, "fp8": True}), world)
    kept, grouped, experts = set(), Grouped(monkeypatch), 0
    for name, module in policy.model.named_modules():
        if isinstance(module, fp8.FP8Linear):
            module.register_forward_hook(is_exact)
        elif isinstance(module, Linear):
            kept.add(".".join(name.split(".")[-2:]))
        elif isinstance(module, GroupedExperts):
            experts += 1
    assert "lm_head" in kept and kept <= KEPT
    actual, theirs = run(policy, routed)
    assert 2 * experts <= grouped.products <= 3 * experts
    # A product is off by 3 to 4 %, and a random model damps none of it from layer to layer.
    assert 0.01 < relative_error(actual, logits.double()) < 0.15
    assert theirs.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.cosine_similarity(theirs[name].flatten(), gradient.flatten(), dim=0) > 0.95, name


def test_absorbed_weight_is_rounded_with_straight_through_gradient() -> None:
    weight = matrix(200, 160).float().requires_grad_()
    gradient = matrix(200, 160, seed=1).float()
    actual = fp8.rounded(weight)
    actual.backward(gradient)
    assert torch.equal(actual, quantize(weight.detach(), BLOCKS).values())
    assert torch.equal(weight.grad, gradient)


def test_only_weights_stored_in_fp8_compute_in_fp8(world: World, tmp_path: Path) -> None:
    policy = build(make_recipe(write(BY_NAME["qwen3"], tmp_path)), world)
    adapt(policy.model, policy.adapter, frozenset({"model.layers.0.mlp.up_proj.weight", "lm_head.weight"}))
    names = [name for name, module in policy.model.named_modules() if isinstance(module, fp8.FP8Linear)]
    assert names == ["layers.0.feed_forward.w3"]


class Layer(torch.nn.Module):
    """Projections of a common input, and experts with gate and up projections of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.ParameterList(matrix(128, 128, seed=i).float() for i in range(3))
        self.experts = torch.nn.ParameterList(matrix(2, 128, 128, seed=i).float() for i in range(2))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        q, k, v = (fp8.linear_product(x, weight) for weight in self.qkv)
        gate, up = (fp8.grouped_product(x, weight, offsets) for weight in self.experts)
        return q * k + v + gate * up


@pytest.mark.parametrize("recomputed", [False, True])
def test_shared_inputs_are_quantized_once(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    names = ("quantize_both_ways", "quantize_groups_both_ways")
    for name in (*names, "_quantize_rows", "quantize_transposed", "quantize_groups", "quantize_groups_transposed"):
        real = getattr(fp8, name)
        monkeypatch.setattr(fp8, name, lambda *a, _name=name, _real=real: (made.update([_name]), _real(*a))[1])
    module, offsets = Layer(), torch.tensor([30, 100], dtype=torch.int32)
    results = []
    for seed in (5, 6):  # the second input may lie where the first one was
        x = matrix(100, 128, seed=seed).float().requires_grad_()
        made.clear()
        inside = x * 1
        out = checkpoint(module, inside, offsets, use_reentrant=False) if recomputed else module(inside, offsets)
        forward = Counter(made)
        out.sum().backward()
        # Input once for all that take it, and each product's gradient by rows and by columns at once.
        assert forward == {"_quantize_rows": 1, "quantize_groups": 1}
        again = 1 if recomputed else 0
        assert made["_quantize_rows"] <= 1 + again and made["quantize_groups"] <= 1 + again
        assert made["quantize_transposed"] == made["quantize_groups_transposed"] == 1
        assert made["quantize_both_ways"] == 3 and made["quantize_groups_both_ways"] == 2
        results.append((out.detach(), x.grad, [p.grad.clone() for p in module.parameters()]))
        module.zero_grad()
        del x, inside, out
    monkeypatch.setattr(fp8.QuantizedCache, "of", lambda self, tensor, make, beside=None: make(tensor))
    for seed, (out, for_x, for_weights) in zip((5, 6), results, strict=True):
        x = matrix(100, 128, seed=seed).float().requires_grad_()
        expected = module(x * 1, offsets)
        expected.sum().backward()
        assert torch.equal(out, expected.detach()) and torch.equal(for_x, x.grad)
        assert all(torch.equal(mine, p.grad) for mine, p in zip(for_weights, module.parameters(), strict=True))
        module.zero_grad()


def test_cache_recomputes_for_changed_values() -> None:
    last, calls = fp8.QuantizedCache[float](), []

    def of(tensor: torch.Tensor, beside: object = None) -> float:
        return last.of(tensor, lambda t: calls.append(1) or float(t.sum()), beside)

    tensor, groups = torch.ones(4, 4), object()
    assert of(tensor) == of(tensor.detach()) == of(tensor.view(4, 4)) == 16 and len(calls) == 1
    assert of(tensor[1:]) == 12 and of(tensor.mT[:, 1:]) == 12 and len(calls) == 3
    of(tensor, groups), of(tensor, groups)
    assert len(calls) == 4 and of(tensor, object()) == 16 and len(calls) == 5
    of(tensor)
    tensor.detach().add_(1)
    assert of(tensor) == 32
    for value in range(20):  # one after another at the same address
        assert of(torch.full((4, 4), float(value))) == 16 * value


def test_cache_does_not_keep_its_source_alive() -> None:
    last, source = fp8.QuantizedCache[int](), torch.ones(4)
    storage = StorageWeakRef(source.untyped_storage())
    last.of(source, len)
    del source
    assert storage.expired()


def test_cached_result_is_freed_after_its_source() -> None:
    last, other = fp8.QuantizedCache[torch.Tensor](), fp8.QuantizedCache[int]()
    source, asked = torch.ones(4), torch.ones(5)
    result = StorageWeakRef(last.of(source, torch.neg).untyped_storage())
    other.of(asked, len)
    assert not result.expired()
    del source
    other.of(asked, len)
    assert result.expired()
