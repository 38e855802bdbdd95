"""The head agent: the state of the whole run, and its end."""
