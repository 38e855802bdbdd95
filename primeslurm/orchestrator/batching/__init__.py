"""Turns groups into batches: filters, credit, packing into rows, and the shards of the trainer's ranks."""
