"""Container images of Harbor tasks: which are needed, and how they are built."""
