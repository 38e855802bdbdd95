"""Reading of recipes and site files, and messages about faults in them."""
