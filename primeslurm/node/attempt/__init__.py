"""An attempt's begin and end."""
