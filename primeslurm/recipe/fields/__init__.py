"""The base class of sections, types of fields, and rules for all strings."""
