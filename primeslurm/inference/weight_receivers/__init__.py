"""Weight updates in engine workers: vLLM weight-transfer backends for files and for NCCL."""
