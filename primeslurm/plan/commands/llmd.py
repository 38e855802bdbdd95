"""llm-d's router without Kubernetes: endpoint picker, Envoy and sidecars, configured by files.

    client -> Envoy -> (asks the picker) -> engine                      engines that do both
    client -> Envoy -> (asks the picker) -> sidecar -> prefill engine, then its own decode engine

`epp`, `pd-sidecar` and `envoy` must be on the PATH of the nodes. They are not Python packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from primeslurm.plan.commands.command import Command, ReplicaEngines
from primeslurm.recipe.sections.routers import LlmdRouter

# Written as JSON, which is valid YAML and has simpler quoting
PICKER_CONFIG, ENDPOINTS, ENVOY_CONFIG = "llm-d-picker.json", "llm-d-endpoints.json", "llm-d-envoy.json"
# Requests in flight beyond which Envoy answers 500. Its default is 1,024.
CIRCUIT_BREAKER = 100_000
_EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"


def picker(router: LlmdRouter, workers: ReplicaEngines, sidecars: Mapping[str, str]) -> Command:
    """Return the command of a replica's endpoint picker. `sidecars` has the sidecar of each decode engine."""
    argv = (
        *("epp", "--config-file", f"${{tmp}}/{PICKER_CONFIG}", "--pool-name", "primeslurm"),
        *("--grpc-port", "${port:grpc}", "--grpc-health-port", "${port:grpc_health}"),
        *("--metrics-port", "${port:http}", "--secure-serving=false", "--health-checking=true"),
    )
    files = {PICKER_CONFIG: _json(_picker_config(router, workers)), ENDPOINTS: _json(_endpoints(workers, sidecars))}
    return Command(argv, {}, ("grpc", "grpc_health", "http"), files)


def sidecar(engine: str) -> Command:
    """Return the command of a decode engine's sidecar, which has a prefill engine compute the prompts."""
    argv = (
        *("pd-sidecar", "--port", "${port:http}", "--model-server-port", f"${{port:{engine}:http}}"),
        *("--kv-connector", "nixlv2", "--secure-serving=false"),
    )
    return Command(argv, {}, ("http",))


def envoy(picker_name: str) -> Command:
    """Return the command of a replica's HTTP server, which sends each request to the engine that the picker chose."""
    argv = ("envoy", "-c", f"${{tmp}}/{ENVOY_CONFIG}", "--service-node", "primeslurm", "--log-level", "warn")
    return Command(argv, {}, ("http",), {ENVOY_CONFIG: _json(_envoy_config(picker_name))})


def _endpoints(workers: ReplicaEngines, sidecars: Mapping[str, str]) -> dict[str, Any]:
    roles = dict.fromkeys(workers.prefill, "prefill") | dict.fromkeys(workers.decode, "decode")
    return {
        "endpoints": [
            {
                "name": name,
                "address": f"${{host:{name}}}",
                "port": f"${{port:{sidecars.get(name, name)}:http}}",
                "labels": {"llm-d.ai/role": roles[name]} if name in roles else {},
            }
            for name in workers.all
        ]
    }


def _picker_config(router: LlmdRouter, workers: ReplicaEngines) -> dict[str, Any]:
    profiles = {"default": router.scorers}
    plugins: list[dict[str, Any]] = []
    filters: dict[str, list[str]] = {"default": []}
    if workers.disaggregated:
        profiles = {"prefill": router.scorers | router.prefill_scorers, "decode": router.scorers}
        filters = {"prefill": ["prefill-filter"], "decode": ["decode-filter"]}
        decider = {"deciders": {"prefill": "prefix-based-pd-decider"}}
        plugins = [
            {"type": "prefill-filter"},
            {"type": "decode-filter"},
            {"type": "disagg-profile-handler", "parameters": decider},
            {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": router.non_cached_tokens}},
        ]
    scorers = sorted({scorer for weights in profiles.values() for scorer in weights})
    discovery = {"path": f"${{tmp}}/{ENDPOINTS}", "watchFile": True}
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"name": "endpoints", "type": "file-discovery", "parameters": discovery},
            {"name": "metrics-source", "type": "metrics-data-source"},
            {"name": "metrics-extractor", "type": "core-metrics-extractor"},
            {"type": "approx-prefix-cache-producer"},
            {"type": "max-score-picker"},
            *plugins,
            *({"type": scorer} for scorer in scorers),
        ],
        "schedulingProfiles": [
            {
                "name": profile,
                "plugins": [
                    *({"pluginRef": name} for name in filters[profile]),
                    *({"pluginRef": scorer, "weight": weight} for scorer, weight in weights.items()),
                    {"pluginRef": "max-score-picker"},
                ],
            }
            for profile, weights in profiles.items()
        ],
        "dataLayer": {
            "injectDefaults": False,
            "discovery": {"endpoints": {"pluginRef": "endpoints"}},
            "sources": [{"pluginRef": "metrics-source", "extractors": [{"pluginRef": "metrics-extractor"}]}],
        },
    }


def _envoy_config(picker_name: str) -> dict[str, Any]:
    picker = _address(f"${{host:{picker_name}}}", f"${{port:{picker_name}:grpc}}")
    breaker = {
        "max_connections": CIRCUIT_BREAKER,
        "max_pending_requests": CIRCUIT_BREAKER,
        "max_requests": CIRCUIT_BREAKER,
    }
    return {
        # No "admin": anybody who reaches Envoy's admin interface can stop it.
        "static_resources": {
            "listeners": [
                {
                    "name": "requests",
                    "address": _address("${host}", "${port:http}"),
                    "filter_chains": [{"filters": [_http_filter()]}],
                }
            ],
            "clusters": [
                {
                    "name": "picked",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "connect_timeout": "60s",
                    "circuit_breakers": {"thresholds": [breaker]},
                    "original_dst_lb_config": {
                        "use_http_header": True,
                        "http_header_name": "x-gateway-destination-endpoint",
                    },
                },
                {
                    "name": "picker",
                    "type": "STATIC",
                    "connect_timeout": "60s",
                    "circuit_breakers": {"thresholds": [breaker]},
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                            "@type": _type("upstreams.http.v3.HttpProtocolOptions"),
                            "explicit_http_config": {"http2_protocol_options": {}},
                        }
                    },
                    "health_checks": [
                        {
                            "timeout": "2s",
                            "interval": "10s",
                            "unhealthy_threshold": 3,
                            "healthy_threshold": 1,
                            "grpc_health_check": {"service_name": _EXT_PROC},
                        }
                    ],
                    "load_assignment": {
                        "cluster_name": "picker",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": picker}}]}],
                    },
                },
            ],
        },
    }


def _http_filter() -> dict[str, Any]:
    streamed = dict.fromkeys(("request_body_mode", "response_body_mode"), "FULL_DUPLEX_STREAMED")
    sent = ("request_header_mode", "response_header_mode", "request_trailer_mode", "response_trailer_mode")
    pick = {
        "@type": _type("filters.http.ext_proc.v3.ExternalProcessor"),
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": dict.fromkeys(sent, "SEND") | streamed,
        "message_timeout": "1000s",
    }
    # Rollouts take hours. The client decides when to give up, not the proxy.
    picked = {"cluster": "picked", "timeout": "86400s", "idle_timeout": "86400s"}
    unpicked = {
        "envoy.filters.http.ext_proc": {"@type": _type("filters.http.ext_proc.v3.ExtProcPerRoute"), "disabled": True}
    }
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": _type("filters.network.http_connection_manager.v3.HttpConnectionManager"),
            "stat_prefix": "requests",
            "stream_idle_timeout": "86400s",
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "routes": [
                            {
                                "match": {"path": "/health"},
                                "direct_response": {"status": 200},
                                "typed_per_filter_config": unpicked,
                            },
                            {"match": {"prefix": "/"}, "route": picked},
                        ],
                    }
                ]
            },
            "http_filters": [
                {"name": "envoy.filters.http.ext_proc", "typed_config": pick},
                {
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": _type("filters.http.router.v3.Router")},
                },
            ],
        },
    }


def _address(host: str, port: str) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.extensions.{name}"


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1)
