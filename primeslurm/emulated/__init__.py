"""Light stand-ins for engines, trainer ranks and environment workers, so that a whole job runs on a small machine.

They take the real command lines (`plan.emulate` changes only the module after `-m`) and speak the real protocols; what
they do not do is compute. Every emulated token stands for 64 real ones, every emulated second for about a minute.
"""
