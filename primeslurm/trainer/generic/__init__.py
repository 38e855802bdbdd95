"""The generic implementation (`model.impl: hf`): models run by the code of transformers, sharded by FSDP alone."""
