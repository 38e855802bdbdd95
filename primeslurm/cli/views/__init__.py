"""What verbs print: tables, folded ranges, the dashboard."""
