"""Records that processes write into a run directory: events, states, heartbeats, starts and ends of attempts.

Writers and readers import the same types, so that type checks catch a renamed field. Records outlive a release: fields
keep their names, a new field has a default, and unknown fields are ignored.
"""
