"""Names of variables, routes and options that planner and processes share. Nothing else, so imports stay cheap."""

from __future__ import annotations

# Environment variable with a rank's local directory for checkpoint copies. The node agent creates and removes it.
LOCAL_CHECKPOINTS = "PRIMESLURM_LOCAL_CHECKPOINTS"
# Model name in requests to engines and routers
SERVED_MODEL = "policy"
# Header in each answer of an engine that holds its own address (`host:port`). Routers pass it on.
ENGINE_HEADER = "X-Primeslurm-Engine"
# Path of an engine's EngineStatus. It answers as soon as the HTTP server is up, while `/health` waits for the current
# policy. Only engines of trained policies have it.
STATUS_PATH = "/primeslurm/status"
# Path of generation requests to engines and routers, with token ids in and out
GENERATE = "/inference/v1/generate"
# Environment variable with the only address from which an engine's KV events can be read
KV_EVENTS_READER = "PRIMESLURM_KV_EVENTS_READER"
# Environment variable that is set if the reader is vllm-router, which does not understand events with cache salts
KV_EVENTS_HIDE_SALT = "PRIMESLURM_KV_EVENTS_HIDE_SALT"
# Name by which requests of a LoRA run ask for its adapter, if engines apply it at run time
ADAPTER = "adapter"
# Weight-transfer backend of engines that apply the adapter at run time
ADAPTER_BACKEND = "primeslurm_adapter"
# Environment variable with the directory of adapters that requests to an engine may name
ADAPTERS = "PRIMESLURM_ADAPTERS"
# Argument between the options of a Dynamo worker and those of vLLM's server
SERVER_OPTIONS_FOLLOW = "--"
