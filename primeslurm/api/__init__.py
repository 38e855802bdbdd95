"""The package's face: what a script does with recipes and runs. `primeslurm` itself exports it.

`load` reads a recipe and its site; what it returns is planned, checked, rendered and submitted. A submitted recipe is
a `Run`, which tells its status, is waited for, cancelled and resumed. All results are frozen; nothing here prints.
"""
