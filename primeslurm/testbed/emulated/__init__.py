"""Emulated engines, trainer ranks, environment workers and KV stores, so that a whole job runs on a small machine.

They accept the real command lines (`plan.stand_ins` replaces only the module after `-m`) and speak the real protocols,
but do not compute. An emulated token stands for 64 real ones, and an emulated second for about a minute.
"""
