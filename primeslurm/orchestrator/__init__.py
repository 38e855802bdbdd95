"""The orchestrator: turns rollouts into the trainer's batches, and keeps the engines at the trainer's policy.

`pipeline.orchestrator` wires the stages. `dispatch` decides which rollout runs next, `rollouts` and `worker` run it,
`batching` makes batches, and `weight_updates` updates the engines.
"""
