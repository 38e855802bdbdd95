"""Output of the verbs: tables, folded ranges, the dashboard."""
