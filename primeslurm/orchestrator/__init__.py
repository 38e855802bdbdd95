"""Turns engines' tokens into the trainer's batches: dispatch, staleness, groups, packing, policy versions, metrics.

`main` wires the process; `dispatch` decides, `workers` talks to the environment processes (`worker`), `server` answers
the trainer, `progress` and `spool` are what survives a kill.
"""
