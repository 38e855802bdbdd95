"""Checks of a recipe, its files and its plan before anything is submitted. Each finding has a reason and usually a fix.

Levels: an `error` is refused everywhere. `blocked` is valid, but a real `submit` refuses it with this version or on
this file system. `warning` and `note` are advice.
"""
