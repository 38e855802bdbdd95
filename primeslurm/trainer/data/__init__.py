"""SFT data and images: reading, tokenizing and packing."""
