"""`primeslurm convert` produces the weights that the trainer would load, in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from primeslurm.api.runs import export
from primeslurm.base.errors import RunError, UsageError
from primeslurm.base.model_files import INDEX
from primeslurm.cli import app
from primeslurm.cli.lazy_verbs import readable
from primeslurm.trainer.weights import convert
from tests.trainer.as_released import to_fp8
from tests.trainer.conftest import tensors
from tests.trainer.families import BY_NAME, write
from tests.trainer.four_bits import to_int4, to_mxfp4

RELEASED: list[tuple[str, Callable[[Path], dict[str, torch.Tensor]]]] = [
    ("gpt_oss", to_mxfp4),
    ("deepseek_v3", to_int4),
    ("qwen3_moe", to_fp8),
]


def released(name: str, store: Callable[[Path], dict[str, torch.Tensor]], directory: Path) -> dict[str, torch.Tensor]:
    """Write a model in three files, with codes and scales of some weights in different files."""
    meant = store(write(BY_NAME[name], directory))
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    index = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        share = {name: stored[name] for name in sorted(stored)[number::3]}
        save_file(share, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(share, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return meant


@pytest.mark.parametrize(("name", "store"), RELEASED, ids=[name for name, _ in RELEASED])
@pytest.mark.parametrize("at_once", [4096, 1 << 24])
def test_converted_model_has_the_same_weights(
    name: str, store: Callable[..., Any], at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "AT_ONCE", at_once)
    source, out = tmp_path / "source", tmp_path / "out"
    meant = released(name, store, source)
    (source / "tokenization_own.py").write_text("# the model's own\n")
    convert.convert(source, out)
    actual = tensors(out)
    index = json.loads((out / INDEX).read_text())
    assert set(actual) == set(meant) == set(index["weight_map"])
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in actual.values())}
    quantised = [name for name, tensor in actual.items() if tensor.dtype == torch.bfloat16]
    assert quantised
    for name, tensor in meant.items():
        assert torch.equal(actual[name].float(), tensor.to(actual[name].dtype).float()), name
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert (out / "tokenization_own.py").exists() and (out / "tokenizer.json").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"source", "out"}
    assert not [file.name for file in out.iterdir() if file.name.startswith(".") or file.name == "conversion.json"]


def test_killed_conversion_resumes_with_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    released("gpt_oss", to_mxfp4, source)
    written: list[str] = []
    killed: list[str] = []
    write_file = convert.Conversion.write

    def counted(self: convert.Conversion, names: list[str], path: Path) -> None:
        if len(written) == 2 and not killed:
            killed.append(path.name)
            path.with_name(f".{path.name}.1").write_text("half of it")
            raise OSError("killed")
        write_file(self, names, path)
        written.append(path.name)

    monkeypatch.setattr(convert, "io_threads", lambda: 1)
    monkeypatch.setattr(convert.Conversion, "write", counted)
    with pytest.raises(OSError, match="killed"):
        convert.convert(source, out)
    first = list(written)
    assert not out.exists() and len(first) == 2
    written.clear()
    convert.convert(source, out)
    assert len(written) == 1 and sorted(first + written) == sorted(file.name for file in out.glob("*.safetensors"))
    assert written == killed and not list(out.glob(".*"))
    whole = tensors(out)
    convert.convert(source, tmp_path / "again")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors(tmp_path / "again").items())


def test_partial_directory_of_another_model_is_deleted(tmp_path: Path) -> None:
    for name, store in RELEASED[:2]:
        released(name, store, tmp_path / name)
    partial = convert._partial_directory(tmp_path / "gpt_oss", tmp_path / "out")
    (partial / "model-0.safetensors").write_text("of gpt-oss")
    convert.convert(tmp_path / "deepseek_v3", tmp_path / "out")
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in tensors(tmp_path / "out")


def test_command_reports_errors(tmp_path: Path) -> None:
    plain = write(BY_NAME["qwen3"], tmp_path / "plain")
    with pytest.raises(UsageError) as missing:
        export.convert(str(tmp_path / "nowhere"), plain)
    assert [violation.field for violation in missing.value.violations] == ["MODEL", "DIR"]
    with pytest.raises(UsageError, match="is not quantised"):
        export.convert(str(plain), tmp_path / "out")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UsageError, match="is stored in int4, which cannot be converted"):
        export.convert(str(plain), tmp_path / "out")


def test_command_converts_and_reports_progress(tmp_path: Path) -> None:
    released("gpt_oss", to_mxfp4, tmp_path / "source")
    done = CliRunner().invoke(readable(app), ["convert", str(tmp_path / "source"), str(tmp_path / "out")])
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'out'}\n"), done.output
    assert done.stderr.splitlines() == ["1 of 3 files", "2 of 3 files"]
    with (tmp_path / "source" / "model-1.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(RunError, match=r"model-1\.safetensors: (truncated|not a safetensors file)"):
        export.convert(str(tmp_path / "source"), tmp_path / "other")
