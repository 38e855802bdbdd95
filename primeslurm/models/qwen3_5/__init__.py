"""Qwen3.5 and its successors, dense and with experts, with an encoder of images or without."""
