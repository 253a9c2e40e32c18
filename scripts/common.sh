# What every script needs first: the repository root and a Python environment. Source it, then call `ensure_environment`:
#
#     source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
#     ensure_environment demo test
#
# Settings, all optional: PYTHON (the interpreter that makes the environment), HEADSTART_VENV (where it lies, default .venv under
# the root), HEADSTART_CONSTRAINTS (the pinned releases, default constraints.txt). pip's own settings are respected.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HEADSTART_VENV:-$ROOT/.venv}"
CONSTRAINTS="${HEADSTART_CONSTRAINTS:-$ROOT/constraints.txt}"

# Print a line that stands out among the output of other programs.
say() {
    printf '\n==> %s\n' "$*"
}

fail() {
    printf '\nerror: %s\n' "$*" >&2
    exit 1
}

# Print the first Python that can make an environment: at least 3.10, with the modules venv and ensurepip.
find_python() {
    local candidate tried=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
        tried="$tried $candidate ($("$candidate" --version 2>&1 || true))"
    done
    fail "Headstart needs Python 3.10 or later with its venv module, but found:${tried:- no Python at all}." \
        "Install one (on Debian and Ubuntu: apt-get install python3 python3-venv), or set PYTHON=/path/to/python3."
}

# Describe what an up-to-date environment was made from: the root, the package's metadata and the pinned releases.
fingerprint() {
    printf '%s %s\n' "$ROOT" "$(cat "$ROOT/pyproject.toml" "$CONSTRAINTS" | cksum)"
}

# Make the environment where it is missing, install the project editable with the extras named, and put it first on PATH.
# Does nothing where an earlier call has installed all of them from the same files.
ensure_environment() {
    local stamp="$VENV/.headstart-stamp" present="" extra wanted python
    [ -f "$CONSTRAINTS" ] || fail "the constraints file $CONSTRAINTS does not exist; unset HEADSTART_CONSTRAINTS or correct it"

    # 1. The environment itself. An interpreter that no longer starts counts as missing.
    if ! "$VENV/bin/python" -c '' >/dev/null 2>&1; then
        python="$(find_python)"
        [ ! -e "$VENV" ] || [ -f "$VENV/pyvenv.cfg" ] || fail "$VENV must be new or a Python environment, but is something else"
        say "making the environment $VENV with $("$python" --version)"
        "$python" -m venv --clear "$VENV"
    fi

    # 2. What an earlier call has installed, if the files are still the same.
    if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$(fingerprint)" ]; then
        present="$(tail -n +2 "$stamp")"
    fi
    wanted="$(printf '%s\n' $present "$@" | sort -u | grep -v '^$' || true)"

    # 3. Install only where an extra is missing; extras of earlier calls stay.
    if [ ! -f "$stamp" ] || [ "$wanted" != "$present" ] || [ "$(head -n 1 "$stamp")" != "$(fingerprint)" ]; then
        extra="$(printf '%s\n' "$wanted" | paste -s -d , -)"
        say "installing Headstart${extra:+ with the extras $extra} (the first time this takes some minutes)"
        "$VENV/bin/python" -m pip install --disable-pip-version-check \
            --constraint "$CONSTRAINTS" --editable "$ROOT${extra:+[$extra]}"
        printf '%s\n%s\n' "$(fingerprint)" "$wanted" >"$stamp"
    fi
    export PATH="$VENV/bin:$PATH"
}

# Print the type that is fast on this machine: bfloat16, but float32 on a CPU that would convert every product.
fast_dtype() {
    python -c 'from headstart.inference.loading import bfloat16_is_slow as slow; print("float32" if slow() else "bfloat16")'
}
