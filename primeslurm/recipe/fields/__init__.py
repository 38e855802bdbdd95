"""What fields of recipe and site are made of: their base, their types, and what a string may be."""
