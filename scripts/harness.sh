#!/usr/bin/env bash
# Install what the Python script of a harness needs, into .venv/harnesses/NAME: jobs install nothing.
# Usage: scripts/harness.sh mini_swe_agent
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?which harness? One of: $(basename -a -s .txt requirements/harnesses/*.txt | xargs)}
lock=requirements/harnesses/$name.txt
place=$PWD/.venv/harnesses/$name
if [[ ! -f $lock ]]; then
  echo "error: there is no $lock; there are: $(basename -a -s .txt requirements/harnesses/*.txt | xargs)" >&2
  exit 2
fi
cmp -s "$lock" "$place/.installed" && exit 0
echo "installing what harness $name needs from $lock" >&2
source scripts/mirror.sh
.venv/bin/uv venv --quiet --clear --python .venv/bin/python "$place"
.venv/bin/uv pip install --quiet --no-deps --compile-bytecode --python "$place/bin/python" --requirement "$lock"
cp "$lock" "$place/.installed"
