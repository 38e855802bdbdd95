"""vllm-router as a run starts it: it serves whoever shows the run's secret, and the workers of the plan stay with it.

    agent --> keeper (this package's main) --> vllm-router, its child
                |  door: answers the agent, and tells the router whether a token is the secret
                |  rounds: asks the router which workers it has, and puts back what it lost

vllm-router can ask a URL whether a bearer token is good (`api_key_validation_urls`; its command line has no option for
it) and then asks for one at every route, generation and administration alike.
"""
