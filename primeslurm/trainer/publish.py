"""Publish a policy: Hugging Face safetensors, one file a layer, in a directory that appears complete or not at all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from primeslurm.trainer import huggingface, lora, peft
from primeslurm.trainer.parallel import Policy
from primeslurm.trainer.world import World
from primeslurm.wire import checkpoints, weights

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name is that of its layer
_EXACT = ("expert_bias_E",)
"""Keeps its dtype: rounding a router's selection bias would change which experts it selects."""


class Publisher:
    """Writes versions of a policy below `<run>/weights`. All ranks call each method together.

    Args:
        dtype: of the published tensors.
        keep: how many of the newest versions stay; so does every version that a committed checkpoint needs.
    """

    def __init__(self, policy: Policy, run_dir: Path, dtype: torch.dtype, keep: int, world: World) -> None:
        self._policy = policy
        self._run_dir = run_dir
        self._dtype = dtype
        self._keep = keep
        self._world = world
        self._saves_adapter = policy.lora is not None and policy.lora.save_adapter

    def publish(self, version: int) -> Path:
        """Write the policy as `version` and return its directory.

        Raises:
            RankError: a rank could not write; nothing is published, and earlier versions are intact.
        """
        final = weights.version_dir(self._run_dir, version)
        partial = final.with_name(f".{final.name}.partial")
        self._world.agree(_attempt(lambda: _fresh(partial)) if self._world.is_main else None, f"publishing v{version}")
        index, failure = self._write_tensors(partial)
        self._world.agree(failure, f"publishing v{version}")
        adapter = peft.tensors(self._policy, self._dtype) if self._saves_adapter else {}
        if self._world.is_main:
            failure = _attempt(lambda: self._complete(partial, final, version, index, adapter))
        self._world.agree(failure, f"publishing v{version}")
        return final

    def discard_after(self, version: int) -> None:
        """Delete versions newer than `version`: an earlier attempt made them after its last commit."""
        if self._world.is_main:
            for newer in weights.published(self._run_dir):
                if newer > version:
                    _remove(weights.version_dir(self._run_dir, newer))
        self._world.barrier()

    def is_sound(self, version: int) -> bool:
        """Whether `version` is published and undamaged."""
        directory = weights.version_dir(self._run_dir, version)
        return bool(self._world.decide(int(self._world.is_main and not weights.damage(directory))))

    def _write_tensors(self, directory: Path) -> tuple[dict[str, str], OSError | None]:
        """Gather layer by layer, spread the writing over the ranks. A rank that cannot write still gathers along."""
        index: dict[str, str] = {}
        failure: OSError | None = None
        for number, tensors in enumerate(export(self._policy, self._dtype)):
            name = f"model-{number:05d}.safetensors"
            index.update(dict.fromkeys(tensors, name))
            if number % self._world.size == self._world.rank and failure is None:
                failure = _attempt(lambda t=tensors, n=name: _save(t, directory / n))
        return index, failure

    def _complete(
        self, partial: Path, final: Path, version: int, index: dict[str, str], adapter: dict[str, torch.Tensor]
    ) -> None:
        if set(index) != self._policy.hf_names:
            raise RuntimeError(f"export and model differ in {sorted(set(index) ^ self._policy.hf_names)[:5]}")
        huggingface.copy_companions(self._policy.source, partial, self._dtype)
        document = {"metadata": {}, "weight_map": index}
        (partial / huggingface.INDEX).write_text(json.dumps(document, indent=2) + "\n")
        if self._policy.lora is not None and adapter:
            peft.write(partial / "adapter", adapter, self._policy.lora, self._policy.source)
        weights.complete(partial, version, str(self._dtype).removeprefix("torch."))
        _remove(final)
        partial.rename(final)
        needed = {version, *checkpoints.committed(self._run_dir)}
        weights.prune(self._run_dir, self._keep, needed)


def export(policy: Policy, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Whole tensors under Hugging Face names, one layer at a time, on every rank (a collective).

    The first dictionary holds what belongs to no layer. At most one layer is gathered at a time. Adapters are added to
    their weights.
    """
    layers: dict[int, dict[str, Any]] = {}
    for name, tensor in policy.model.state_dict().items():  # detached from autograd
        match = _LAYER.search(name)
        layers.setdefault(int(match[1]) if match else -1, {})[name] = tensor
    for layer in sorted(layers):
        # Offloaded masters visit the device: gathering is faster there.
        tensors = {name: tensor.to(policy.device) for name, tensor in layers[layer].items()}
        merged = tensors if policy.lora is None else lora.merge(tensors, policy.lora)
        whole = {}
        for name, tensor in merged.items():
            whole[name] = lora.whole(tensor if name.endswith(_EXACT) else tensor.to(dtype))
        yield policy.adapter.to_hf(whole)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _attempt(action: Any) -> OSError | None:
    """The OSError that `action` raises, if any; safetensors wraps its own."""
    try:
        action()
    except OSError as error:
        return error
    except SafetensorError as error:
        return OSError(str(error))
    return None


def _fresh(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _remove(directory: Path) -> None:
    (directory / weights.MANIFEST).unlink(missing_ok=True)  # first: a half-deleted version must not look complete
    if directory.exists():
        shutil.rmtree(directory)
