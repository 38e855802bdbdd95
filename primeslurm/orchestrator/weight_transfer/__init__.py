"""The orchestrator's part of weight transfer (words: `wire.weight_transfer`): who gets which policy version when."""
