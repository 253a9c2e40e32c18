#!/usr/bin/env bash
# Check style and types: `bash scripts/check.sh`, or `bash scripts/check.sh --lint` for style alone.
# To mend what can be mended: .venv/bin/ruff check --fix . && .venv/bin/ruff format .
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case "${1:-}" in
"" | --lint) ;;
*) fail "check.sh knows only --lint, but was given '$1'" ;;
esac

# 1. An environment with the checkers, and with what the checked files import.
ensure_environment demo dev
cd "$ROOT"

# 2. Style: the rules of pyproject.toml, then the layout of the code.
say "ruff check"
ruff check .
say "ruff format --check"
ruff format --check .
[ "${1:-}" != --lint ] || exit 0

# 3. Types. --pythonpath: the environment may lie elsewhere than pyproject.toml says.
say "pyright"
pyright --pythonpath "$VENV/bin/python"
