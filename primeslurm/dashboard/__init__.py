"""A local web app about runs, and its pages as one file: `primeslurm dashboard` and `primeslurm report`.

It reads run directories and writes nothing. Pages are built in the browser (`static/`) from the JSON of `routes`.
"""
