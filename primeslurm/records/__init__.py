"""What processes write down in a run directory and others read: events, states, heartbeats, records of attempts.

Writers and readers import the same types, so a field that one of them renames does not type-check in the other. Files
outlive releases: fields keep their names, what an older release did not write has a default, and what a newer one adds
is passed over.
"""
