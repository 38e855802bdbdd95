"""Parts of a training step that any family uses."""
