"""Which node does what: what is asked of the site, and who is put where."""
