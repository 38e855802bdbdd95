"""Models without a family of their own, run by the code of transformers (`model.impl: hf`)."""
