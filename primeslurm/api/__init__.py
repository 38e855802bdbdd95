"""The Python interface to recipes and runs. `primeslurm` itself exports it.

`load` reads a recipe and its site. Its result can be planned, checked, rendered and submitted. A submitted recipe is a
`Run`, which returns its status and can be awaited, cancelled and resumed. All results are frozen. Nothing here prints.
"""
