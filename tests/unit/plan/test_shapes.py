"""Every shape of an inference deployment: engines, their groups, GPUs, ports and environment."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.base.errors import UsageError
from primeslurm.node.agent.node_context import resolve
from primeslurm.plan.model import Plan, Process
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import merge
from primeslurm.recipe.rules.recipe import violations
from primeslurm.wire.transport.addresses import Addresses
from tests.support.recipes import recipe_data, site
from tests.unit.plan.test_plan import RUN, VALUES, disaggregated

WIDE = {"inference": {"expert_parallel": True}}


def plan_for(*changes: dict[str, Any]) -> Plan:
    data = recipe_data()
    for change in changes:
        data = merge(data, change)
    return derive(Recipe.model_validate(data), site(), RUN)


def engines(plan: Plan, *roles: str) -> list[Process]:
    return [process for process in plan.processes() if process.role in (roles or ("engine", "prefill", "decode"))]


def option(process: Process, name: str) -> str | None:
    return process.argv[process.argv.index(name) + 1] if name in process.argv else None


def ranks(group: list[Process]) -> list[tuple[str | None, str | None]]:
    return [(option(e, "--data-parallel-rank"), option(e, "--data-parallel-size")) for e in group]


def filled(process: Process, plan: Plan, value: str) -> str:
    hosts = {p.name: f"10.0.0.{p.node}" for p in plan.processes()}
    ports = {p.name: p.ports for p in plan.processes()}
    return resolve(
        value, process.name, Addresses(hosts, ports), dict.fromkeys((*VALUES, "secret", "generate_token"), "")
    )


def test_one_node_tp_2_dp_4_with_shared_experts() -> None:
    shape = {"inference": {"parallel": {"tp": 2}}, "deployment": {"inference": {"type": "single_node"}}}
    plan = plan_for(WIDE, shape)
    group = engines(plan)
    assert [engine.gpus for engine in group] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert ranks(group) == [(str(rank), "4") for rank in range(4)]
    assert {option(e, "--data-parallel-address") for e in group} == {"${host:engine-r0-0}"}
    assert {option(e, "--data-parallel-rpc-port") for e in group} == {"${port:engine-r0-0:dp_rpc}"}
    assert {option(e, "--all2all-backend") for e in group} == {"allgather_reducescatter"}
    assert all("--enable-expert-parallel" in e.argv for e in group)
    assert {(e.restart, e.restart_group) for e in group} == {("unit", "engine-r0-g0")}
    assert len({e.ports["http"] for e in group}) == 4


def test_two_nodes_of_independent_engines() -> None:
    shape = {"inference": {"parallel": {"tp": 2}}, "deployment": {"inference": {"nodes_per_replica": 2}}}
    plan = plan_for(shape)
    group = engines(plan)
    assert [len([e for e in group if e.node == node]) for node in plan.replicas[0].nodes] == [4, 4]
    assert ranks(group) == [(None, None)] * 8
    assert {(e.restart, e.restart_group) for e in group} == {("in_place", None)}
    assert plan.process("router-0").after == tuple(e.name for e in group)


def test_wide_ep_over_two_nodes_tp_2_dp_8() -> None:
    shape = {"inference": {"parallel": {"tp": 2}}, "deployment": {"inference": {"nodes_per_replica": 2}}}
    group = engines(plan_for(WIDE, shape))
    assert ranks(group) == [(str(rank), "8") for rank in range(8)]
    assert [e.gpus for e in group[4:]] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {e.restart_group for e in group} == {"engine-r0-g0"}
    assert ["dp_rpc" in e.ports for e in group] == [True, *[False] * 7]


def test_six_nodes_two_prefill_groups_of_two_and_one_decode_group_of_two() -> None:
    plan = plan_for(WIDE, disaggregated(prefill=(2, 2), decode=(2, 1)))
    prefill, decode = engines(plan, "prefill"), engines(plan, "decode")
    assert (len(prefill), len(decode), plan.totals.inference_nodes) == (32, 16, 6)
    sizes = {group.name: group.nodes for group in plan.groups}
    assert sizes == {"control": 1, "train": 1, "prefill": 4, "decode": 2}
    assert ranks(prefill) == [(str(rank), "16") for rank in range(16)] * 2
    assert ranks(decode) == [(str(rank), "16") for rank in range(16)]
    assert [e.restart_group for e in (*prefill[::16], *decode[:1])] == [
        "prefill-r0-g0",
        "prefill-r0-g1",
        "decode-r0-g0",
    ]
    heads = [option(e, "--data-parallel-address") for e in prefill]
    assert heads == ["${host:prefill-r0-0}"] * 16 + ["${host:prefill-r0-16}"] * 16
    assert {option(e, "--all2all-backend") for e in prefill} == {"deepep_high_throughput"}
    assert {option(e, "--all2all-backend") for e in decode} == {"deepep_low_latency"}
    assert {option(e, "--compilation-config") for e in decode} == {'{"cudagraph_mode": "FULL_DECODE_ONLY"}'}
    assert {option(e, "--compilation-config") for e in prefill} == {None}


def test_the_side_channel_of_each_rank_is_the_port_that_was_reserved_for_it() -> None:
    plan = plan_for(WIDE, disaggregated(prefill=(2, 1), decode=(1, 1)))
    for engine in engines(plan):
        base = int(filled(engine, plan, engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]))
        assert base + int(option(engine, "--data-parallel-rank") or 0) == engine.ports["nixl"]
        assert filled(engine, plan, engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"]) == f"10.0.0.{engine.node}"
        assert engine.env["UCX_RCACHE_MAX_UNRELEASED"] == "1024"
        assert engine.env["UCX_NET_DEVICES"] == "${ucx_devices_near}"


def test_three_replicas_of_six_nodes_have_three_routers_and_share_nothing() -> None:
    plan = plan_for(WIDE, disaggregated(3, prefill=(2, 2), decode=(2, 1)))
    assert (plan.totals.inference_nodes, plan.totals.routers, plan.totals.engines) == (18, 3, 144)
    assert [len(replica.nodes) for replica in plan.replicas] == [6, 6, 6]
    routers = [process for process in plan.processes() if process.role == "router"]
    assert [router.name for router in routers] == ["router-0", "router-1", "router-2"]
    for router, replica in zip(routers, plan.replicas, strict=True):
        assert router.node == replica.nodes[0]
        assert all(f"-r{replica.index}-" in name for name in router.after)
        assert router.argv.count("--prefill") == 32 and router.argv.count("--decode") == 16
    assert len({unit for e in engines(plan) if (unit := e.restart_group)}) == 9
    nodes = [set(replica.nodes) for replica in plan.replicas]
    assert not (nodes[0] & nodes[1] or nodes[1] & nodes[2] or nodes[0] & nodes[2])


def test_without_engines_there_is_no_store() -> None:
    task = {"task": "sft", "environments": [], "sft": {"data": {"type": "jsonl", "path": "x"}}}
    plan = plan_for({**task, "inference": {"kv_offload": {"type": "mooncake", "cpu": {"bytes": 2**40}}}})
    assert {process.role for process in plan.processes()} == {"trainer"}


def test_a_store_spans_all_inference_nodes_and_every_engine_waits_for_its_own() -> None:
    offload = {"type": "mooncake", "cpu": {"bytes": 2**40}, "disk": {"path": "/scratch/kv", "bytes": 2**41}}
    plan = plan_for(disaggregated(2, (1, 1), (1, 1)), {"inference": {"kv_offload": offload}})
    stores = [process for process in plan.processes() if process.role == "store"]
    inference = sorted(node for replica in plan.replicas for node in replica.nodes)
    assert [s.name for s in stores if s.name != "store-master"] == [f"store-{node}" for node in inference]
    assert plan.process("store-master").node == 0 != inference[0], "no other node is needed while a replica serves"
    for store in stores:
        assert store.after == (() if store.name == "store-master" else ("store-master",))
    for engine in engines(plan):
        assert f"store-{engine.node}" in engine.after
        config = json.loads(filled(engine, plan, engine.files["mooncake.json"]))
        master = plan.process("store-master")
        assert config["master_server_address"] == f"10.0.0.{master.node}:{master.ports['rpc']}"
        assert config["metadata_server"] == f"http://10.0.0.{master.node}:{master.ports['metadata']}/metadata"
        assert (config["mode"], config["protocol"], config["enable_offload"]) == ("standalone-store", "rdma", True)
        transfer = json.loads(option(engine, "--kv-transfer-config") or "")
        nixl, store_connector = transfer["kv_connector_extra_config"]["connectors"]
        assert (nixl["kv_connector"], store_connector["kv_connector"]) == ("NixlConnector", "MooncakeStoreConnector")
        assert store_connector["kv_connector_extra_config"]["cache_prefix"] == "${run_id}"
        assert engine.scratch == ()  # the client has the disk
    client = plan.process(f"store-{inference[0]}")
    assert client.scratch == ("/scratch/kv/primeslurm-${run_id}-n${node}-${key}",)
    assert client.env["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] == client.scratch[0]
    assert client.env["MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE"] == str(2**41)
    assert (option(client, "--protocol"), option(client, "--device_names")) == ("rdma", "${hcas}")


@pytest.mark.parametrize("disk", [None, {"path": "/scratch/kv", "bytes": 2**41}])
def test_native_tiers_are_behind_engines_that_prefill(disk: dict[str, Any] | None) -> None:
    offload = {"type": "native", "cpu": {"bytes": 2**40}} | ({"disk": disk} if disk else {})
    plan = plan_for(disaggregated(), {"inference": {"kv_offload": offload}})
    for engine in engines(plan, "prefill"):
        transfer = json.loads(option(engine, "--kv-transfer-config") or "")
        tiers = transfer["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
        assert tiers["cpu_bytes_to_use"] == 2**40 and transfer["kv_load_failure_policy"] == "recompute"
        secondary = tiers.get("secondary_tiers", [])
        # Engines of a node share the scratch directory, so each has a directory of its own in it.
        assert [tier["root_dir"] for tier in secondary] == [f"{path}/${{port:http}}" for path in engine.scratch]
        assert [tier["max_bytes"] for tier in secondary] == ([2**41] if disk else [])
        assert bool(engine.scratch) == (disk is not None)
    for engine in engines(plan, "decode"):
        assert json.loads(option(engine, "--kv-transfer-config") or "")["kv_connector"] == "NixlConnector"


def serve(router: dict[str, Any], *changes: dict[str, Any]) -> Plan:
    return plan_for({"task": "serve", "environments": [], "inference": {"router": router}}, *changes)


def test_dynamo_workers_and_frontend_of_a_replica_find_one_another() -> None:
    plan = serve({"type": "dynamo", "session_ttl_s": 60}, disaggregated(2))
    for replica in plan.replicas:
        frontend = plan.process(replica.router)
        members = [plan.process(name) for name in replica.engines]
        assert {p.env["DYN_NAMESPACE"] for p in (frontend, *members)} == {f"replica-{replica.index}"}
        assert {p.env["DYN_FILE_KV"] for p in (frontend, *members)} == {"${attempt_dir}/dynamo"}
        assert {option(p, "--disaggregation-mode") for p in members} == {"prefill", "decode"}
        assert option(frontend, "--router-session-affinity-ttl-secs") == "60"
        for worker in members:
            assert worker.argv[2] == "primeslurm.inference.dynamo_worker"
            at = worker.argv.index("--")
            assert not {"--port", "--middleware"} & set(worker.argv[:at]), "options of vLLM's server come last"
            assert worker.health and worker.health.path == "/health"
            assert json.loads(option(worker, "--kv-events-config") or "")["endpoint"].startswith("tcp://127.0.0.1:")


KV_AWARE = {"type": "vllm-router", "policy": "kv_aware"}


TWO_NODES = {"deployment": {"inference": {"type": "multi_node", "nodes_per_replica": 2}}}


@pytest.mark.parametrize(("shape", "publishers"), [(merge(WIDE, TWO_NODES), 16), (disaggregated(2), 16)])
def test_the_router_reads_the_kv_events_of_each_engine_that_prefills(shape: dict[str, Any], publishers: int) -> None:
    plan = serve(KV_AWARE, shape)
    publishing = [engine for engine in engines(plan) if option(engine, "--kv-events-config")]
    assert {engine.role for engine in publishing} <= {"engine", "prefill"} and len(publishing) == publishers
    assert {option(engine, "--block-size") for engine in engines(plan)} == {"64"}
    for engine in publishing:
        router = plan.process(f"router-{engine.replica}")
        config = json.loads(filled(engine, plan, option(engine, "--kv-events-config") or ""))
        url = f"10.0.0.{engine.node}:{{}}".format
        assert config["endpoint"] == f"tcp://{url(engine.ports['kv_events'])}"
        assert config["replay_endpoint"] == f"tcp://{url(engine.ports['kv_replay'])}"
        assert filled(engine, plan, engine.env["PRIMESLURM_KV_EVENTS_READER"]) == f"10.0.0.{router.node}"
        words = [filled(router, plan, word) for word in router.argv]
        sources = {f"http://{url(engine.ports['http'])}={config[each]}" for each in ("endpoint", "replay_endpoint")}
        # The router asks prefill engines for their endpoints.
        assert sources & set(words) == (sources if engine.role == "engine" else set())


@pytest.mark.parametrize("router", [KV_AWARE | {"policy": "consistent_hash"}, {"type": "llm-d"}])
def test_engines_publish_kv_events_only_for_a_router_that_reads_them(router: dict[str, Any]) -> None:
    for process in serve(router).processes():
        assert not {"--kv-events-config", "--kv-event-source", "--block-size"} & set(process.argv)
        assert "kv_events" not in process.ports and "PRIMESLURM_KV_EVENTS_READER" not in process.env


def test_kv_events_are_refused_with_options_that_the_router_must_know() -> None:
    assert not violations(Recipe.model_validate(recipe_data(inference={"router": KV_AWARE})))
    data = recipe_data(inference={"router": KV_AWARE, "vllm_extra": {"block_size": 16}})
    assert [each.field for each in violations(Recipe.model_validate(data))] == ["inference.vllm_extra.block_size"]


def test_dynamo_workers_of_rollouts_have_all_options_of_engines() -> None:
    plain, in_dynamo = plan_for({}), plan_for({"inference": {"router": {"type": "dynamo"}}})
    for engine, worker in zip(engines(plain), engines(in_dynamo), strict=True):
        missing = {word for word in engine.argv if word.startswith("--")} - set(worker.argv)
        assert missing == {"--enable-scale-out", "--disable-uvicorn-access-log"}
        assert worker.health == engine.health and worker.ports["http"]


def test_llm_d_picks_among_all_engines_and_reaches_decode_engines_by_their_sidecars() -> None:
    plan = plan_for({"inference": {"router": {"type": "llm-d"}}}, disaggregated())
    picker, envoy = plan.process("picker-0"), plan.process("router-0")
    listed = yaml.safe_load(filled(picker, plan, picker.files["llm-d-endpoints.json"]))["endpoints"]
    assert [endpoint["name"] for endpoint in listed] == list(plan.replicas[0].engines)
    for endpoint in listed:
        engine = plan.process(endpoint["name"])
        reached = engine if engine.role == "prefill" else plan.process(f"sidecar-{engine.name}")
        assert reached.node == engine.node
        assert (endpoint["address"], endpoint["port"]) == (f"10.0.0.{engine.node}", str(reached.ports["http"]))
        assert endpoint["labels"] == {"llm-d.ai/role": engine.role}
        assert reached.health and reached.health.port == "http"
        if engine.role == "decode":
            argv = [filled(reached, plan, word) for word in reached.argv]
            assert argv[argv.index("--model-server-port") + 1] == str(engine.ports["http"])
    config = yaml.safe_load(picker.files["llm-d-picker.json"])
    defined = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    used = {plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]}
    assert used <= defined and [p["name"] for p in config["schedulingProfiles"]] == ["prefill", "decode"]
    proxy = yaml.safe_load(filled(envoy, plan, envoy.files["llm-d-envoy.json"]))["static_resources"]
    target = proxy["clusters"][1]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
    assert target["socket_address"] == {"address": f"10.0.0.{picker.node}", "port_value": str(picker.ports["grpc"])}
    assert proxy["listeners"][0]["address"]["socket_address"]["port_value"] == str(envoy.ports["http"])


def test_llm_d_without_disaggregation_has_one_profile_and_no_sidecars() -> None:
    plan = plan_for({"inference": {"router": {"type": "llm-d"}}})
    config = json.loads(plan.process("picker-0").files["llm-d-picker.json"])
    assert [profile["name"] for profile in config["schedulingProfiles"]] == ["default"]
    assert not [process for process in plan.processes() if process.name.startswith("sidecar")]


def test_serving_engines_ask_for_the_secret_alone_and_are_ready_when_healthy() -> None:
    plan = serve({"type": "vllm-router"})
    assert {process.role for process in plan.processes()} == {"engine", "router"}
    for engine in engines(plan):
        assert option(engine, "--middleware") == "primeslurm.inference.liveness_gate.LivenessGate"
        assert engine.health and engine.health.path == "/health"


@given(
    st.sampled_from(["vllm-router", "dynamo", "llm-d"]),
    st.sampled_from([None, "native", "mooncake"]),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([1, 4]),
)
def test_every_combination_has_distinct_ports_known_placeholders_and_liveness_checks(
    router: str, offload: str | None, wide: bool, replicas: int, tp: int
) -> None:
    tiers = (
        {"kv_offload": {"type": offload, "cpu": {"bytes": 2**30}, "disk": {"path": "/d", "bytes": 2**31}}}
        if offload
        else {}
    )
    inference = {"expert_parallel": wide, "parallel": {"tp": tp}, **tiers}
    plan = serve({"type": router}, disaggregated(replicas), {"inference": inference})
    for node in plan.nodes:
        ports = [port for process in node.processes for port in process.ports.values()]
        assert len(set(ports)) == len(ports)
    for process in plan.processes():
        assert process.health or process.heartbeats, f"nothing would detect that {process.name} is unresponsive"
        for text in (*process.argv, *process.env.values(), *process.files.values()):
            assert "${" not in filled(process, plan, text)


def test_dp_must_divide_the_engines_of_a_group() -> None:
    with pytest.raises(UsageError, match="must divide the 8 engines of a group"):
        plan_for(WIDE, {"inference": {"parallel": {"dp": 3}}})


def test_a_policy_between_two_needs_two_engines_of_each_role() -> None:
    two = {"inference": {"router": {"type": "vllm-router", "policy": "power_of_two"}, "parallel": {"tp": 8}}}
    with pytest.raises(UsageError, match="a replica has only one of role prefill"):
        plan_for(disaggregated(decode=(2, 1)), two)
    plan_for(disaggregated(prefill=(2, 1), decode=(2, 1)), two)
    two["inference"]["router"] = {"type": "vllm-router", "decode_policy": "power_of_two"}
    with pytest.raises(UsageError, match=r"(?s)router.decode_policy.*only one of role decode"):
        plan_for(disaggregated(prefill=(1, 1), decode=(1, 1)), two)
    plan_for(disaggregated(prefill=(1, 1), decode=(2, 1)), two)


@pytest.mark.parametrize(
    ("model", "tool_call", "reasoning"),
    [
        ("zai-org/GLM-5.1", "glm47", "glm45"),
        ("/models/Qwen3-30B-A3B/", "hermes", "qwen3"),
        ("Qwen/Qwen3-Coder-480B", "qwen3_coder", None),
        ("somebody/unheard-of", None, None),
    ],
)
def test_served_models_get_the_parsers_of_their_family(
    model: str, tool_call: str | None, reasoning: str | None
) -> None:
    for engine in engines(serve({"type": "vllm-router"}, {"model": {"path": model}})):
        assert (option(engine, "--tool-call-parser"), option(engine, "--reasoning-parser")) == (tool_call, reasoning)
        assert ("--enable-auto-tool-choice" in engine.argv) == (tool_call is not None)


def test_engines_that_are_trained_for_get_no_parsers() -> None:
    for engine in engines(plan_for({"model": {"path": "zai-org/GLM-5.1"}})):
        assert option(engine, "--tool-call-parser") is None and option(engine, "--reasoning-parser") is None


def test_engines_on_cpus_move_tokens_between_experts_without_a_gpu() -> None:
    recipe = Recipe.model_validate(merge(merge(recipe_data(), WIDE), disaggregated()))
    plan = derive(recipe, site(device="cpu"), RUN)
    assert {option(e, "--all2all-backend") for e in engines(plan)} == {"allgather_reducescatter"}
