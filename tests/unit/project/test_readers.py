"""Every function that decodes bytes is fuzzed, or this module says why not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "primeslurm"
FUZZ = ROOT / "tests" / "unit" / "fuzz"
DECODE = re.compile(
    r"(json|pickle|torch|np|tomllib)\.loads?|(np|torch)\.frombuffer|(py)?base64\.b64decode|ast\.literal_eval"
    r"|msgspec\.(json|msgpack|yaml|toml)\.(decode|Decoder)|msgspec\.convert|yaml\.(safe_)?load|zlib\.decompress(obj)?"
    r"|(decoding\.)?(value|decode_json)|read_json|[\w.]+\.(unpack(_from)?|model_validate_json)"
    r"|[\w.]+\.(recv(_multipart|_into|_fds)?|readexactly|readuntil)"
)
FUZZED = {
    "emulated/engine.py:EmulatedEngine.__call__": "test_servers:test_bodies_that_are_something_else",
    "emulated/ranks.py:_Doorkeeper._shows": "test_ranks:test_whoever_says_anything_is_no_rank",
    "emulated/ranks.py:_exactly": "test_ranks:test_a_rank_takes_nobody_for_rank_0",
    "files.py:FileWatcher._look": "test_files:test_json_that_others_replace",
    "files.py:read_json": "test_files:test_json_that_others_replace",
    "inference/gate.py:_version": "test_servers:test_the_gate_knows_a_version_or_none",
    "inference/router/health_endpoint.py:RouterHealthEndpoint._connected": (
        "test_doors:test_a_door_answers_or_hangs_up_and_counts_no_stranger"
    ),
    "inference/router/workers.py:listed": "test_answers:test_lists_of_routers",
    "orchestrator/dispatch/curricula.py:_read_lines": "test_files:test_outcomes_of_curricula",
    "orchestrator/environments/sandbox/box.py:Box._read": "test_sandbox:test_nothing_else_breaks",
    "orchestrator/environments/shell.py:ShellHarness._output": (
        "test_answers:test_arguments_of_a_call_are_what_the_model_says"
    ),
    "orchestrator/evaluation/archive.py:Archive.unfinished": "test_files:test_unfinished_evaluations",
    "orchestrator/progress.py:restore": "test_files:test_how_far_a_run_is",
    "models/deepseek_v3/deepseek_v31_renderer.py:parse_call": "test_answers:test_arguments_that_are_read_for_protocols",
    "orchestrator/rendering/dialects.py:_arguments": "test_answers:test_arguments_that_are_read_for_protocols",
    "orchestrator/rollouts/generate_endpoint.py:completion_of": "test_answers:test_answers_of_engines",
    "orchestrator/rollouts/groups.py:RolloutGroup.from_bytes": "test_messages:test_spooled_groups",
    "orchestrator/rollouts/groups.py:decode_head": (
        "test_messages:test_files_of_groups_of_which_the_head_is_read_first"
    ),
    "orchestrator/rollouts/job_protocol.py:JobRunner._listen": (
        "test_sockets:test_whatever_a_worker_is_told_it_goes_on"
    ),
    "orchestrator/rollouts/spool.py:SpooledGroup.experts_apart": (
        "test_messages:test_files_of_groups_of_which_the_head_is_read_first"
    ),
    "orchestrator/rollouts/pieces.py:_taken": ("test_sockets:test_pieces_that_do_not_fit_are_damaged_and_nothing_else"),
    "orchestrator/rollouts/pieces.py:joined": ("test_sockets:test_pieces_that_do_not_fit_are_damaged_and_nothing_else"),
    "orchestrator/rollouts/worker_pool.py:WorkerPool._receive": (
        "test_sockets:test_what_no_worker_says_is_passed_over"
    ),
    "orchestrator/rollouts/worker_pool.py:WorkerPool.serve": "test_sockets:test_what_no_worker_says_is_passed_over",
    "orchestrator/telemetry/worker_deaths.py:load": "test_files:test_deaths_of_workers",
    "orchestrator/teacher/client.py:_logprob_in": "test_answers:test_answers_of_teachers",
    "orchestrator/teacher/client.py:_logprobs_in": "test_answers:test_answers_of_teachers",
    "orchestrator/weight_transfer/engine_client.py:EngineClient.status": (
        "test_answers:test_whoever_asks_gets_a_value_or_the_error_that_says_so"
    ),
    "plan/plan_file.py:_fill": "test_files:test_plans",
    "plan/plan_file.py:plain": "test_files:test_plans",
    "records/beats.py:HeartbeatPage.read": "test_files:test_beats",
    "records/events/__init__.py:": "test_files:test_events",
    "records/events/__init__.py:_decode_as_python": "test_files:test_events",
    "records/metrics.py:row_of": "test_files:test_metrics",
    "records/reading.py:_convert": "test_files:test_records",
    "records/reading.py:read_record": "test_files:test_records",
    "run/status/placement.py:placement_of": "test_files:test_plans",
    "slurm/inventory.py:_parse": "test_files:test_what_nodes_have_installed",
    "trainer/weights/headers.py:_entries": "test_model_files:test_headers_of_tensors",
    "trainer/weights/headers.py:read_header.read": "test_model_files:test_headers_of_tensors",
    "trainer/weights/tensor_files.py:_file_names": "test_model_files:test_indices_of_tensors",
    "wire/batches/batch_files.py:_head": "test_messages:test_files_of_batches",
    "wire/batches/data_uri.py:decode": "test_messages:test_images_within_messages",
    "wire/batches/rollouts.py:IncomingArrays.__init__": (
        "test_sockets:test_whatever_a_trainer_is_answered_is_a_batch_or_its_one_error"
    ),
    "wire/batches/rollouts.py:IncomingArrays.take": (
        "test_sockets:test_whatever_a_trainer_is_answered_is_a_batch_or_its_one_error"
    ),
    "wire/batches/rollouts.py:from_frames": "test_messages:test_batches",
    "wire/batches/routed_experts.py:_decoded": "test_answers:test_routed_experts",
    "wire/environment_probe.py:decoded": "test_files:test_what_a_look_at_environments_found",
    "wire/received.py:array": "test_messages:test_rollouts",
    "wire/stored/manifest.py:parsed": "test_files:test_manifests",
    "wire/transport/addresses.py:AddressBook._read": "test_files:test_json_that_others_replace",
    "wire/transport/link.py:OrchestratorLink._answer": "test_sockets:test_every_request_is_answered",
    "wire/transport/link.py:OrchestratorLink.serve": "test_sockets:test_what_is_no_request_is_passed_over",
    "wire/transport/link.py:TrainerLink._ask": (
        "test_sockets:test_whatever_a_trainer_is_answered_is_a_batch_or_its_one_error"
    ),
    "wire/transport/rendezvous.py:_Gate._admit": "test_doors:test_a_gate_lets_nobody_in_without_a_proof",
    "wire/transport/rendezvous.py:_Passage._show": "test_doors:test_a_passage_tells_no_impostor_anything",
    "wire/weight_transfer/collective.py:Channel.experts": "test_catalogues:test_experts_of_receivers",
    "wire/weight_transfer/collective.py:unpacked": "test_catalogues:test_catalogues",
}
"""The function that decodes, and the test that shows it what is damaged, in `tests/unit/fuzz`."""
OWN = {
    "the model's or the data's files, which the user chose; what is wrong in them is an error that names the file": (
        "api/exporting.py",
        "chat/jsonl_lines.py",
        "chat/messages.py",
        "node/preflight/checks.py",
        "orchestrator/batching/filters.py",
        "orchestrator/environments/math_problems.py",
        "orchestrator/rendering/renderer_selection.py",
        "models/gpt_oss/harmony.py",
        "orchestrator/rollouts/plausible.py",
        "plan/checks/files.py",
        "plan/checks/model_tensors.py",
        "plan/checks/teacher.py",
        "trainer/weights/huggingface.py",
        "wire/stored/task_images.py",
    ),
    "what this package, its parent process or this process itself has written": (
        "api/setup/installing.py",
        "emulated/environment.py",
        "emulated/training.py",
        "models/catalog.py",
        "inference/router/serve.py",
        "node/agent/fork_server.py",
        "node/agent/forks.py",
        "node/preflight/loaded.py",
        "orchestrator/environments/sandbox/box.py",
        "orchestrator/environments/sandbox/inside.py",
        "orchestrator/environments/sandbox/namespaces.py",
        "orchestrator/environments/sandbox/scripts.py",
        "orchestrator/main.py",
        "orchestrator/rendering/template_comparison.py",
        "orchestrator/rollouts/worker.py",
        "plan/plan_file.py",
        "run/diff.py",
        "slurm/embedded/cluster.py",
        "slurm/inventory.py",
        "trainer/checkpoints/export.py",
        "trainer/checkpoints/shards.py",
        "trainer/data/token_files.py",
        "trainer/main.py",
        "trainer/optimizers/host_states.py",
    ),
    "one byte, or a tensor into room that was made before, of who has shown the secret": (
        "emulated/ranks.py",
        "trainer/checkpoints/local_copies.py",
        "wire/weight_transfer/collective.py",
    ),
    "the kernel's answer": ("node/host/network.py",),
}
"""Modules with a function that is not in FUZZED, and why."""
ELSEWHERE = {
    "trainer/data/image_reader.py": "tests/trainer/data/test_damaged_images.py",
    "orchestrator/rollouts/tool_servers.py": "tests/unit/orchestrator/test_tool_servers.py",
}
"""Damaged beside tests of what they need."""


def sites(node: ast.AST, within: str = "") -> Iterator[str]:
    """Functions with a call that turns bytes into values; "": the module itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and DECODE.fullmatch(ast.unparse(child.func)):
            yield within
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from sites(child, f"{within}.{child.name}".lstrip(".") if is_named else within)


def decoders() -> set[str]:
    """All such functions of the package, behind their module."""
    return {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in PACKAGE.rglob("*.py")
        for name in sites(ast.parse(path.read_text()))
    }


def modules(functions: Iterable[str]) -> set[str]:
    return {each.partition(":")[0] for each in functions}


def test_every_function_that_decodes_is_fuzzed_or_reads_its_own() -> None:
    own = {module for modules in OWN.values() for module in modules}
    found = decoders()
    rest = found - FUZZED.keys()
    assert sorted(each for each in rest if each.partition(":")[0] not in own) == []
    assert sorted(FUZZED.keys() - found) == [], "they decode nothing any more"
    assert sorted(own - modules(rest)) == [], "they decode nothing any more, or it is fuzzed"


def test_the_tests_that_fuzz_are_there() -> None:
    there = {
        f"{path.stem}:{node.name}"
        for path in FUZZ.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert sorted(set(FUZZED.values()) - there) == []


def test_the_check_sees_what_it_looks_for() -> None:
    text = """
DECODER = msgspec.json.Decoder(int)
class Server:
    async def serve(self):
        def inner():
            return _HEAD.unpack_from(self.socket.recv(8))
        return inner()
def read(path):
    return [decoding.value(each, int) for each in path]
"""
    assert sorted(set(sites(ast.parse(text)))) == ["", "Server.serve.inner", "read"]


def imported(text: str) -> set[str]:
    """Modules, and names in them, that a test imports."""
    found = set(re.findall(r"^from (primeslurm[\w.]*) import", text, re.MULTILINE))
    pairs = re.findall(r"^from (primeslurm[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    return found | {f"{module}.{name.strip()}" for module, names in pairs for name in names.split(",")}


@pytest.mark.parametrize(("module", "test"), ELSEWHERE.items())
def test_what_is_damaged_elsewhere_is_imported_there(module: str, test: str) -> None:
    assert (PACKAGE / module).is_file()
    name = f"primeslurm.{module.removesuffix('.py').replace('/', '.')}"
    assert any(each.startswith(name) for each in imported((ROOT / test).read_text()))
