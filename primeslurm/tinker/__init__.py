"""A service for the Tinker API: clients train LoRA adapters of one model, and sample from them."""
