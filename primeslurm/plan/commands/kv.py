"""KV transfer between engines (NIXL), KV offload to host memory and disk, and the shared Mooncake store.

    prefill --NIXL--> decode          native: engine -> its node's memory -> its node's disk
    any engine <--Mooncake--> memory (and disk) of every inference node of the run

A decode engine gets the KV of its prompts from prefill engines, so it reads no other tier. It writes the KV that it
decodes to a Mooncake store, where the prefill of the next turn of the conversation finds it.
"""

from __future__ import annotations

import json
from typing import Any

from primeslurm.plan.commands.command import Command, Device, EngineRole
from primeslurm.plan.commands.engine_defaults import kv_lease_s
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.kv_offload import KvOffload, MooncakeOffload, NativeOffload

# Name of the process that knows the location of every block of the store
STORE_MASTER = "store-master"
STORE_CONFIG = "mooncake.json"
# Largest file of a Mooncake client's disk tier [bytes]
BUCKET_BYTES = 2**28
# Bytes that each worker of an engine allocates for transfers to and from the store, unless the store is smaller
MAX_TRANSFER_BUFFER = 4 * 2**30
# Time for which a block that was looked up cannot be evicted. An engine without free blocks loads it late. Blocks of
# old policies must not stay for long.
LEASE_MS = 120_000
# The same with a disk tier, where an evicted block is read from disk. A client's own read of a value that it writes to
# disk takes a lease too. A long lease would thus keep values in memory that are on disk, and memory would be full.
DISK_LEASE_MS = 5_000

Config = dict[str, Any]


def transfer_config(recipe: Recipe, role: EngineRole, device: Device) -> Config | None:
    """Return vLLM's `--kv-transfer-config` of an engine; None if its KV is neither transferred nor offloaded."""
    connectors = [_nixl(role, device, kv_lease_s(recipe))] if role != "engine" else []
    match recipe.inference.kv_offload:
        case NativeOffload() as native if role != "decode":
            connectors.append(_native(native))
        case MooncakeOffload():
            connectors.append(_mooncake(role))
    if not connectors:
        return None
    config = connectors[0]
    if len(connectors) > 1:
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
        }
    if recipe.inference.kv_offload is not None and role != "decode":
        # A tier may lose a block between look-up and load. The engine has the prompt, so it can recompute the block.
        config = {**config, "kv_load_failure_policy": "recompute"}
    return config


def engine_env(recipe: Recipe, role: EngineRole, device: Device, rank: int) -> dict[str, str]:
    """Return the environment of an engine's KV connectors."""
    env: dict[str, str] = {}
    if role != "engine":
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "${host}",
            # vLLM adds the data-parallel rank to this number. The result must be the port that is reserved here.
            "VLLM_NIXL_SIDE_CHANNEL_PORT": f"${{port:nixl-{rank}}}" if rank else "${port:nixl}",
            "UCX_RCACHE_MAX_UNRELEASED": "1024",  # an unbounded registration cache of UCX sometimes crashes engines
            "UCX_NET_DEVICES": "${ucx_devices_near}",
        }
        env["UCX_TLS"] = "tcp,self,sm" if device == "cpu" else "all"
    if isinstance(recipe.inference.kv_offload, MooncakeOffload):
        env |= {
            "MOONCAKE_CONFIG_PATH": f"${{tmp}}/{STORE_CONFIG}",
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "${host}",
            "PYTHONHASHSEED": "0",  # some of vLLM's hashes of blocks depend on it, and engines must agree on them
        }
    return env


def engine_files(recipe: Recipe, device: Device) -> dict[str, str]:
    offload = recipe.inference.kv_offload
    if not isinstance(offload, MooncakeOffload):
        return {}
    config = {
        "mode": "standalone-store",
        "metadata_server": _metadata_url(),
        "master_server_address": f"${{addr:{STORE_MASTER}:rpc}}",
        "protocol": _protocol(offload, device),
        "device_name": _devices(offload, device),
        "global_segment_size": 0,  # the node's client provides the memory, not its engines
        "local_buffer_size": min(MAX_TRANSFER_BUFFER, offload.cpu.bytes),
        "enable_offload": offload.disk is not None,
    }
    return {STORE_CONFIG: json.dumps(config)}


def engine_scratch(recipe: Recipe, role: EngineRole) -> tuple[str, ...]:
    """Return the directories on the node's disk to which an engine writes KV."""
    offload = recipe.inference.kv_offload
    writes_disk = isinstance(offload, NativeOffload) and role != "decode"
    return _disk(offload) if writes_disk else ()


def store_master(recipe: Recipe) -> Command:
    """Return the command of the run's Mooncake master, which includes the metadata server of engines and clients."""
    scratch = _disk(recipe.inference.kv_offload)
    argv = [
        *("${python}", "-m", "mooncake.cli", "--logtostderr"),
        *("--rpc_address", "${host}", "--rpc_port", "${port:rpc}"),
        "--enable_http_metadata_server",
        *("--http_metadata_server_host", "${host}", "--http_metadata_server_port", "${port:metadata}"),
        "--enable_metadata_cleanup_on_timeout",  # otherwise a dead engine stays a peer forever
        *("--metrics_host", "${host}", "--metrics_port", "${port:http}"),
        *("--default_kv_lease_ttl", str(DISK_LEASE_MS if scratch else LEASE_MS)),
    ]
    if scratch:
        # By default, a value is queued for the disk when it is stored, but memory may evict it before the client has
        # collected a full bucket, and then it is lost. With offload_on_evict, a value stays in memory until it is on
        # disk, and values for which there is no room are not stored.
        argv += ["--enable_offload=true", "--offload_on_evict=true"]
    return Command(tuple(argv), {}, ("rpc", "metadata", "http"))


def store_client(offload: MooncakeOffload, device: Device) -> Command:
    """Return the command of a node's Mooncake client, which adds the node's memory (and disk) to the store."""
    argv = [
        *("${python}", "-m", "primeslurm.inference.store_client", "--logtostderr"),
        *("--host", "${host}", "--port", "${port:rpc}"),
        *("--global_segment_size", str(offload.cpu.bytes)),
        *("--master_server_address", f"${{addr:{STORE_MASTER}:rpc}}", "--metadata_server", _metadata_url()),
        *("--protocol", _protocol(offload, device), "--device_names", _devices(offload, device)),
        *("--enable_http_server", "--http_port", "${port:http}"),
    ]
    env: dict[str, str] = {}
    scratch = _disk(offload)
    if offload.disk:
        argv.append("--enable_offload=true")
        env = _offload_env(scratch[0], offload.disk.bytes)
    return Command(tuple(argv), env, ("rpc", "http"), scratch=scratch)


def _offload_env(directory: str, size: int) -> dict[str, str]:
    """Return the settings of a Mooncake client's disk tier of `size` bytes."""
    return {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": directory,
        # The client writes only full buckets, and asks for evicted values only in its heartbeats. With the defaults of
        # 500 values and 10 s, full memory refuses values for long.
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "16",
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(min(BUCKET_BYTES, size // 4)),
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(size),  # default: 90 % of the file system
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(size),
        "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
    }


def _nixl(role: EngineRole, device: Device, lease_s: int | None) -> Config:
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    config = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": device}
    return config if lease_s is None else {**config, "kv_connector_extra_config": {"kv_lease_duration": lease_s}}


def _native(offload: NativeOffload) -> Config:
    extra: Config = {"cpu_bytes_to_use": offload.cpu.bytes}
    if disk := _disk(offload):
        tier = {
            "type": "BoundedFileTier",
            "module_path": "primeslurm.inference.disk_tier",
            # Engines of a node share the scratch directory. Each deletes only its own files.
            "root_dir": f"{disk[0]}/${{port:http}}",
            "max_bytes": offload.disk.bytes if offload.disk else 0,
        }
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _mooncake(role: EngineRole) -> Config:
    # The store outlives engines, and another run may find it, so keys include the run. Engines look blocks up through a
    # socket whose name must differ between engines of a node, so it includes a port.
    extra: Config = {"cache_prefix": "${run_id}", "lookup_rpc_port": "${port:http}"}
    if role == "decode":
        extra["save_decode_cache"] = True
    kv_role = "kv_consumer" if role == "decode" else "kv_both"
    return {"kv_connector": "MooncakeStoreConnector", "kv_role": kv_role, "kv_connector_extra_config": extra}


def _disk(offload: KvOffload | None) -> tuple[str, ...]:
    """Return the run's directory on this node. Nodes of an emulated cluster share one disk."""
    if offload is None or offload.disk is None:
        return ()
    return (f"{offload.disk.path}/primeslurm-${{run_id}}-n${{node}}-${{key}}",)


def _metadata_url() -> str:
    return f"http://${{addr:{STORE_MASTER}:metadata}}/metadata"


def _protocol(offload: MooncakeOffload, device: Device) -> str:
    return offload.protocol or ("rdma" if device == "cuda" else "tcp")


def _devices(offload: MooncakeOffload, device: Device) -> str:
    """Return the HCAs for RDMA: the recipe's, else those of the site or the node."""
    if _protocol(offload, device) == "tcp":
        return ""
    return ",".join(offload.devices) or "${hcas}"
