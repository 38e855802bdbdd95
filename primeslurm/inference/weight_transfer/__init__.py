"""The engines' part of weight transfer (words: `wire.weight_transfer`): how a worker takes a new policy."""
