"""vLLM accepts every command line of a plan."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from primeslurm.models import families
from primeslurm.plan.commands.command import Device, EngineRole, long_options
from primeslurm.plan.commands.engine import DataParallel
from primeslurm.plan.commands.engine_defaults import BATCHES, ENVIRONMENT, OPTIONS
from primeslurm.plan.estimates.engine_memory import PROMPT_TOKENS
from primeslurm.recipe.reading.recipe_files import read_recipe
from primeslurm.recipe.rules import engine_options
from tests.engine.conftest import tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.processes import fill

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
READY = sorted([*ROOT.glob("recipes/*.yaml"), *ROOT.glob("examples/**/*.yaml")])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("role", ["engine", "prefill", "decode"])
def test_vllm_parses_the_options(model: Path, device: Device, role: EngineRole) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = engine_command(tiny_recipe(model, vllm_extra={"max_num_seqs": 7}), device, role, "python")
    argv = [fill(part, {"host": "127.0.0.1", "port:http": "1234"}) for part in command.argv[3:]]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    assert (args.port, args.served_model_name, args.max_num_seqs) == (1234, ["policy"], 7)
    assert args.weight_transfer_config.backend == "primeslurm_filesystem"
    assert args.middleware == ["primeslurm.inference.version_gate.VersionGate"]
    assert (args.kv_transfer_config is not None) == (role != "engine")


def test_stored_options_are_those_of_the_installed_vllm() -> None:
    from scripts.engine_options import PATH, text

    hint = "run `./just docs` after moving the pin of vLLM"
    assert PATH.read_text() == text(), hint


def test_vllm_and_the_check_agree_on_values() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, checked = make_arg_parser(FlexibleArgumentParser()), 0
    free = engine_options.options().keys() - engine_options.PLANNED.keys() - engine_options.RECIPE_FIELDS.keys()
    free -= engine_options.ROLE_FIELDS.keys() | engine_options.IN_RL.keys()
    for name in sorted(free):
        schema, default = engine_options.options()[name]["schema"], parser.get_default(name)
        values = [each for each in schema.get("enum", ()) if each is not None]
        if type(default) in (bool, int, float, str) and default not in (False, argparse.SUPPRESS):
            values.append(default)
        for value in values:
            recipe = tiny_recipe(Path("m"), vllm_extra={name: value})
            assert engine_options.violations(recipe) == [], (name, value)
            parser.parse_args(long_options({name: engine_options.argument(name, value)}))
            checked += 1
    assert checked > 200


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_vllm_knows_the_options_and_variables_of_ready_recipes(path: Path) -> None:
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    recipe, parser = read_recipe(path, []).valid_value(), make_arg_parser(FlexibleArgumentParser())
    roles: tuple[EngineRole, ...] = ("engine", "prefill", "decode")
    for role in roles:
        command = engine_command(recipe, "cuda", role, "python", DataParallel(size=2, rank=1, head="engine-0"))
        args = parser.parse_args([re.sub(r"\$\{[^}]+\}", "1", part) for part in command.argv[3:]])
        assert args.max_model_len == recipe.max_len, role
        assert {name for name in command.env if name.startswith("VLLM_")} <= envs.environment_variables.keys(), role


def test_table_of_defaults_names_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    defaults = {each.name: parser.get_default(each.name) for each in (*OPTIONS, *BATCHES)}
    for name in (each.name for each in ENVIRONMENT if each.name.startswith("VLLM_")):
        monkeypatch.delenv(name, raising=False)
        value = envs.environment_variables[name]()
        defaults[name] = int(value) if isinstance(value, bool) else value
    for each in (each for each in (*OPTIONS, *BATCHES, *ENVIRONMENT) if each.name in defaults):
        value = defaults[each.name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert each.default.partition(" ")[0] == text, each.name


def test_vllm_keeps_the_trainers_full_precision_weights(model: Path) -> None:
    from vllm.config.quantization import resolve_quantization_config
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    argv = engine_command(tiny_recipe(model, quantization="fp8"), "cuda", "engine", "python").argv[3:]
    parts = [fill(part, {"host": "127.0.0.1", "port:http": "1234"}) for part in argv]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(parts)
    config = OnlineQuantizationConfig(resolve_quantization_config(args.quantization, args.quantization_config))
    # of its module for Qwen3.5, which cannot be imported without torchvision
    config.packed_modules_mapping = {
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    layers = {
        "linear_attn.in_proj_ba": False,
        "linear_attn.in_proj_qkvz": True,
        "linear_attn.out_proj": True,
        "mlp.gate": False,
        "mlp.gate_up_proj": True,
    }
    for name, quantised in layers.items():
        method = config.resolve_quant_method_cls(LinearBase, f"model.layers.0.{name}")
        assert (method is not None) == quantised, name


def test_vllm_computes_prompt_logits_in_chunks_of_the_estimated_size() -> None:
    from vllm.v1.worker.gpu.sample import prompt_logprob

    assert prompt_logprob.CHUNK_SIZE == PROMPT_TOKENS


def test_vllm_has_every_named_parser() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for parsers in (parsers for family in families() for parsers in family.parsers.values()):
        if parsers.tool_call:
            ToolParserManager.get_tool_parser(parsers.tool_call)
        if parsers.reasoning:
            ReasoningParserManager.get_reasoning_parser(parsers.reasoning)
