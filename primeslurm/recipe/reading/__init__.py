"""From YAML on disk to validated models, and from a mistake to one clear sentence."""
