#!/bin/sh
# Make .venv in the checkout and bring it to what this folder asks for. Quick when nothing changed.
# With the argument `check` also what only `make check` needs.
#   PYTHON  the interpreter to build on; default: the first python3 of a version that fits
#   TORCH   what pip shall install as torch, or "system" for the torch the machine already has
#   HASHES  "off" for a package index that has files of its own making: versions are exact all the same
set -eu
cd "$(dirname "$0")/.."

fits='import sys; raise SystemExit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
# Python 3.13 only where it is named: it cannot run the server (docs/containers.md).
serves='import sys; raise SystemExit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'
kind=${1:-setup}
stamp=.venv/installed-$kind.sha256
own_torch=.venv/own-torch

wanted() {
    { cat requirements/*.txt requirements/install.sh; echo "${TORCH:-} ${HASHES:-}"; } | sha256sum | cut -d' ' -f1
}

# Whether .venv can be kept: it runs, and neither PYTHON nor TORCH asks for another kind of one.
usable() {
    .venv/bin/python -c "$fits" 2>/dev/null || return 1
    if [ "${TORCH:-}" = system ]; then
        grep -q 'include-system-site-packages = true' .venv/pyvenv.cfg || return 1
    fi
    [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V)" = "$(.venv/bin/python -V)" ]
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c "$([ -n "${PYTHON:-}" ] && echo "$fits" || echo "$serves")" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "No Python 3.10, 3.11 or 3.12 was found (looked for: ${PYTHON:-python3 python3.12 python3.11 python3.10})." >&2
    echo "Install one, or name it: make setup PYTHON=/path/to/python3" >&2
    return 1
}

# Prints the Debian packages that are missing: the venv module's parts where the system's Python is
# split up, and Python's shared library, which the tritonserver's Python backend links to.
missing_packages() {
    "$1" - <<'CODE'
import ctypes, importlib.util, os, sys, sysconfig
version = f"{sys.version_info[0]}.{sys.version_info[1]}"
if not importlib.util.find_spec("ensurepip"):
    print(f"python{version}-venv")
library = f"libpython{version}.so.1.0"
for path in (library, os.path.join(sysconfig.get_config_var("LIBDIR") or "", library)):
    try:
        ctypes.CDLL(path)
        break
    except OSError:
        continue
else:
    print(f"libpython{version}")
CODE
}

install_packages() {
    if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        echo "These system packages are missing: $*" >&2
        echo "Install them as root, for example: apt-get install $*" >&2
        return 1
    fi
    echo "Installing system packages: $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >/dev/null 2>&1 || {
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
    }
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-compile -qq "$@"
}

# pip would compile one module after the other, those of the packages' tests as well.
compile_modules() {
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    .venv/bin/python -m compileall -q -j 0 -x 'site-packages/.*/tests?/' "$packages" >/dev/null || true
}

# The command `launcher` of this checkout.
install_command() {
    cat >.venv/bin/launcher <<'SCRIPT'
#!/bin/sh
bin=$(dirname "$(readlink -f "$0")")
exec "$bin/python3" "$bin/../../launcher_scripts/launcher.py" "$@"
SCRIPT
    chmod +x .venv/bin/launcher
}

# install_locked FILE OPTION...: packages with other hashes are not installed.
install_locked() {
    file=$1
    shift
    if [ "${HASHES:-}" = off ]; then
        sed -e '/^ *--hash=/d' -e 's/ \\$//' "requirements/$file" >".venv/$file"
        pip_install "$@" -r ".venv/$file"
    else
        pip_install "$@" --require-hashes -r "requirements/$file"
    fi
}

# After the packages that it depends on, which have their versions and hashes.
install_torch() {
    case "${TORCH:-}" in
        "") pip_install -r requirements/torch.txt ;;
        system) .venv/bin/python -c 'import torch' ;;
        *)  # TORCH is a list of pip's arguments.
            # shellcheck disable=SC2086
            pip_install $TORCH ;;
    esac
}

if [ -z "${TORCH:-}" ] && [ -f "$own_torch" ]; then
    TORCH=$(cat "$own_torch")
fi
if usable; then
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted)" ]; then
        exit 0
    fi
    python=.venv/bin/python
else
    python=$(find_python)
fi
packages=$(missing_packages "$python")
if [ -n "$packages" ]; then
    # shellcheck disable=SC2086
    install_packages $packages
fi
if [ "$python" != .venv/bin/python ]; then
    echo "Making .venv with $python"
    rm -rf .venv
    if [ "${TORCH:-}" = system ]; then
        "$python" -m venv --system-site-packages .venv
    else
        "$python" -m venv .venv
    fi
fi
rm -f "$stamp"
echo "[1/5] packages of the launcher, its jobs and the quickstart"
install_locked constraints.txt
if [ "$kind" = check ]; then
    echo "      packages of the tests"
    install_locked constraints-dev.txt
fi
echo "[2/5] torch ${TORCH:-(from the public index a CUDA build of several gigabytes)}"
install_torch
echo "[3/5] tritonserver"
install_locked server.txt --no-deps
install_locked no-deps.txt --no-deps
echo "[4/5] the Triton language"
if ! .venv/bin/python -c 'import triton' 2>/dev/null; then
    pip_install -r requirements/triton.txt
fi
echo "[5/5] compiling modules, and the command .venv/bin/launcher"
compile_modules
install_command
if [ -n "${TORCH:-}" ]; then
    echo "$TORCH" >"$own_torch"
fi
wanted >"$stamp"
