"""Parts of the training step that do not depend on the model family: losses, LoRA, FP8, activation memory."""
