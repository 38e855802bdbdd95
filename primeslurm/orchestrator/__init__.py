"""Turns engines' tokens into the trainer's batches: dispatch, staleness, groups, packing, policy versions, metrics.

`main` starts the process; `dispatch` decides which rollout runs next, `rollouts.worker_pool` has environment workers
run them (`rollouts.worker`), `batching` makes rows of what `algorithms` say, `server` answers the trainer, and
`weight_transfer` keeps the engines at its policy. `progress` and `rollouts.spool` are what survives a kill.
"""
