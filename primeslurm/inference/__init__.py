"""What runs inside vLLM engines: gate, plugin, policies taken over from the trainer, and fixes of vLLM on CPUs."""
