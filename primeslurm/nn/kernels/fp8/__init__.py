"""Block-scaled FP8: quantization, matrix products, and backends."""
