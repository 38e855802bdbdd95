"""Code that runs inside vLLM engines and routers: middleware, plugin, weight updates and patches of vLLM."""
