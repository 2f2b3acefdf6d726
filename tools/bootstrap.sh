#!/bin/sh
# Set up .venv with nvep (editable) and everything that `make demo` and `make test` use. Needs only Python >= 3.11 and
# PyPI: no GPU, no compiler, no MPI of the system, no writable home. Run again, it does nothing until pyproject.toml,
# this script, the interpreter or the compiler found changes.
#
#   tools/bootstrap.sh            create or refresh .venv
#   tools/bootstrap.sh --python   print the interpreter that would be used
set -eu
cd "$(dirname "$0")/.."
venv=.venv
say() { echo "bootstrap: $*" >&2; }
fail() { say "$@"; exit 1; }

# The interpreter behind an activated environment, since that environment may be the very one to be replaced.
find_python() {
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
        "$candidate" -c '
import os, sys
if sys.version_info < (3, 11):
    sys.exit(1)
print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))' 2>/dev/null && return 0
    done
    return 1
}

# The emulated device compiles kernels with a host C++ compiler; nvep itself looks for the same names in this order.
find_compiler() {
    for candidate in ${CXX:-} c++ g++ clang++; do
        if command -v "$candidate" >/dev/null 2>&1; then echo "$candidate"; return 0; fi
    done
    return 1
}

# Debian splits ensurepip off the standard library, so `python3 -m venv` may be there and not work.
create_venv() {
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    rm -rf "$venv"
    if "$python" -m venv "$venv" >"$log" 2>&1; then return 0; fi
    rm -rf "$venv"
    if "$python" -m virtualenv -q "$venv" >>"$log" 2>&1; then return 0; fi
    rm -rf "$venv"
    if command -v uv >/dev/null 2>&1 && uv venv -q --seed --python "$python" "$venv" >>"$log" 2>&1; then return 0; fi
    rm -rf "$venv"
    # Without ensurepip, a pip of the system can install pip into a bare environment.
    if "$python" -m venv --without-pip "$venv" >>"$log" 2>&1 &&
        "$python" -m pip --python "$venv/bin/python" install -q pip >>"$log" 2>&1; then return 0; fi
    rm -rf "$venv"
    cat "$log" >&2
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    fail "$python cannot create a virtual environment; install its venv module:" \
        "apt install python$version-venv (Debian, Ubuntu)"
}

python=$(find_python) || fail "no Python >= 3.11 found; install one (apt install python3 python3-venv) or set PYTHON"
if [ "${1:-}" = --python ]; then echo "$python"; exit 0; fi
compiler=$(find_compiler) || compiler="ziglang wheel"

# A copied checkout must not use the environment of the one it was copied from: the path is part of the key.
key=$( { cat pyproject.toml tools/bootstrap.sh; "$python" -VV; echo "$python"; echo "$compiler"; pwd; } | cksum)
if [ -x "$venv/bin/nvep" ] && [ "$(cat "$venv/.nvep-stamp" 2>/dev/null)" = "$key" ]; then exit 0; fi

started=$(date +%s)
say "Python: $("$python" -V 2>&1 | cut -d' ' -f2) at $python"
say "C++ compiler of the emulated device: $compiler"
create_venv
packages="-e .[dev]"
if [ "$compiler" = "ziglang wheel" ]; then packages="$packages ziglang"; fi
say "installing nvep and its wheels from PyPI"
# shellcheck disable=SC2086  # two words on purpose
"$venv/bin/python" -m pip install -q --no-input --disable-pip-version-check $packages
echo "$key" >"$venv/.nvep-stamp"
say "ready in $(($(date +%s) - started)) s: $venv"
