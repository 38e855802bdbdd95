"""The `hf` of a page's reader: `hf download NAME [--repo-type dataset] [--local-dir DIR]`.

A data set becomes its files with a few rows each, and a model in a directory becomes a copy of the reader's small
model. A model for the cache is not written, so that `check` takes its shape from the catalog and reports it as missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from tests.support.pages.reader import ROWS


def main() -> None:
    parser = argparse.ArgumentParser(prog="hf")
    parser.add_argument("verb", choices=["download"])
    parser.add_argument("name")
    parser.add_argument("--repo-type", choices=["dataset", "model"], default="model")
    parser.add_argument("--local-dir", type=Path)
    arguments = parser.parse_args()
    if arguments.repo_type == "model":
        if arguments.local_dir is not None:
            shutil.copytree(Path(os.environ["HOME"], "model"), arguments.local_dir, dirs_exist_ok=True)
            config = arguments.local_dir / "config.json"
            longest = {"max_position_embeddings": 1 << 20}  # long enough for the recipes of all pages
            config.write_text(json.dumps(json.loads(config.read_text()) | longest))
        return
    import pyarrow
    import pyarrow.parquet

    files, row = ROWS[arguments.name]
    table = pyarrow.table({name: [value] * 64 for name, value in row.items()})
    for file in files:
        (arguments.local_dir / file).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, arguments.local_dir / file)


if __name__ == "__main__":
    main()
