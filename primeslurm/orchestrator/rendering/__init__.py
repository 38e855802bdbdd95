"""From messages to token ids and back, as the model's own chat template does it, from turn to turn."""
