"""vLLM itself accepts every command line that we plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.plan.parsers import FAMILIES
from tests.engine.conftest import tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.processes import fill

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("role", ["engine", "prefill", "decode"])
def test_vllm_parses_the_options(model: Path, device, role) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = engine_command(tiny_recipe(model, vllm_extra={"max_num_seqs": 7}), device, role, "python")
    argv = [fill(part, {"host": "127.0.0.1", "port:http": "1234"}) for part in command.argv[3:]]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    assert (args.port, args.served_model_name, args.max_num_seqs) == (1234, ["policy"], 7)
    assert args.weight_transfer_config.backend == "primeslurm_filesystem"
    assert args.middleware == ["primeslurm.inference.gate.VersionGate"]
    assert (args.kv_transfer_config is not None) == (role != "engine")


def test_vllm_has_every_parser_that_we_name() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for parsers in FAMILIES.values():
        if parsers.tool_call:
            ToolParserManager.get_tool_parser(parsers.tool_call)
        if parsers.reasoning:
            ReasoningParserManager.get_reasoning_parser(parsers.reasoning)
