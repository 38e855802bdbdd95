"""Write a tiny, randomly initialised Maple with a tokenizer: `python -m own_family.tiny DIR`."""

import json
import sys
from pathlib import Path

from scripts.models import tiny_model


def main() -> None:
    directory = Path(sys.argv[1])
    tiny_model.write_model(directory, family="qwen3")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "maple"}, indent=2))


if __name__ == "__main__":
    main()
