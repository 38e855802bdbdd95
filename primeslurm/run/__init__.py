"""The files of a run on disk, and functions that read them."""
