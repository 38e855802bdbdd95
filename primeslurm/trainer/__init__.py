"""The torchtitan trainer: models, parallelism, loss, checkpoints, weight publishing, the RL and SFT loops."""
