"""The orchestrator's pipeline: dispatch -> collect -> finalize -> batch -> serve. `orchestrator` wires the stages."""
