"""vllm-router as a run starts it: it serves clients with the run's secret, and keeps the workers of the plan.

    agent --> supervisor (this package's main) --> vllm-router, its child process
                |  health endpoint: answers the agent, and checks tokens for the router
                |  rounds: compare the router's workers with the plan, and restore missing ones

vllm-router can ask a URL whether a bearer token is valid (`api_key_validation_urls`, for which its command line has no
option). It then requires a valid token on every route.
"""
