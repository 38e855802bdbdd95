"""The trainer's part of weight transfer (words: `wire.weight_transfer`): it publishes policies, or sends them."""
