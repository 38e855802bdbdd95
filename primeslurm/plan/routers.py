"""What stands in front of a replica's engines."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.plan.commands import Command, long_options, url_of
from primeslurm.recipe import Recipe


def router_command(
    recipe: Recipe, python: str, engines: Sequence[str] = (), prefill: Sequence[str] = (), decode: Sequence[str] = ()
) -> Command:
    """The router in front of one replica: over `engines`, or over `prefill` and `decode` (names of processes).

    Raises:
        ValueError: not exactly one of the two shapes is given.
    """
    if bool(engines) == bool(prefill and decode) or bool(prefill) != bool(decode):
        raise ValueError("a router serves either engines, or prefill and decode engines")
    policy = recipe.inference.router.policy
    options: dict[str, object] = {"host": "${host}", "port": "${port:http}", "policy": policy}
    argv = [python, "-m", "vllm_router.launch_router", *long_options(options | _ROUTER_OPTIONS)]
    argv += ["--request-timeout-secs", str(recipe.orchestrator.request_timeout_s)]
    if engines:
        argv += ["--worker-urls", *map(url_of, engines)]
    else:
        argv += ["--vllm-pd-disaggregation", "--prefill-policy", policy, "--decode-policy", policy]
        argv += [part for name in prefill for part in ("--prefill", url_of(name))]
        argv += [part for name in decode for part in ("--decode", url_of(name))]
    return Command(tuple(argv), {"RUST_LOG": "warn"}, ("http", "metrics"))  # below: three lines a request


_ROUTER_OPTIONS: dict[str, object] = {
    "prometheus_host": "${host}",
    "prometheus_port": "${port:metrics}",
    # It listens only once an engine is open, and would give up waiting for one after ten minutes.
    "worker_startup_timeout_secs": 7 * 86400,
    "worker_startup_check_interval": 1,
    # An engine that dies or goes stale must leave the router in about a second, and come back as fast: the router
    # retries nothing between prefill and decode, so until then its clients see errors.
    "health_check_interval_secs": 1,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 1,
    "health_success_threshold": 1,
    "cb_failure_threshold": 2,
    "cb_success_threshold": 1,
    "cb_timeout_duration_secs": 2,
}
