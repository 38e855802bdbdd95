"""Rendering of conversations into token ids and back: which renderer a model gets, and what programs may send."""
