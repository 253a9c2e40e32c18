#!/usr/bin/env bash
# Run the tests: `bash scripts/test.sh`. Arguments go to pytest:
#
#     bash scripts/test.sh tests/core -x                  # some of them
#     bash scripts/test.sh -m slow                        # those that the default leaves out: slow, gpu, distributed
#     bash scripts/test.sh --cov --cov-report=term        # with coverage
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# 1. An environment with everything that the tests import.
ensure_environment demo dev
cd "$ROOT"

# 2. Style first: it takes a second.
bash scripts/check.sh --lint

# 3. The tests. No test may reach a model hub: one that tries fails at once instead of waiting.
say "pytest"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python -m pytest "$@"

say "done; the tests left out by default run with -m slow, -m gpu or -m distributed (bash scripts/test.sh -m slow)"
