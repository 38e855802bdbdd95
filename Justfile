# What a newcomer and a developer do. `./just setup` once; everything else sets up what it needs by itself.
set shell := ["bash", "-euo", "pipefail", "-c"]

home := ".primeslurm"
bin := ".venv/bin"

# List what there is
default:
    @{{ bin }}/just --list --unsorted

# Install what is missing: Python packages from the lock, and, where possible, Slurm
setup:
    scripts/setup.sh

# Run recipes/reverse_text.yaml on an embedded Slurm cluster and show it live
demo recipe="recipes/reverse_text.yaml": setup
    scripts/demo.sh {{ recipe }}

# The demo's warm start: a tiny Qwen3-MoE, taught by noisy demonstrations
warm-start: setup
    scripts/warm_start.sh {{ home }}/reverse-text

# Lint, type-check and run all tests
test *args: setup lint
    scripts/test.sh {{ args }}

# ruff, mypy, import rules
lint: setup
    {{ bin }}/ruff check .
    {{ bin }}/ruff format --check .
    {{ bin }}/mypy
    {{ bin }}/lint-imports

# Run the tests that need no servers, in seconds
unit *args: setup
    {{ bin }}/python -m pytest tests/unit {{ args }}

# Rewrite the golden files from what is rendered now
golden: setup
    PRIMESLURM_UPDATE_GOLDEN=1 {{ bin }}/python -m pytest -q tests/unit/test_render.py

# Rewrite the generated pages of docs/
docs: setup
    PYTHONPATH=. {{ bin }}/python scripts/docs.py
