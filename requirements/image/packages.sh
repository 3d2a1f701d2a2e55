#!/bin/sh
# Install what the jobs and the launcher need into the Debian 12 that this runs in, as root.
#   TORCH  pip's arguments for another torch than that of torch.txt, such as one for CPUs
set -eu
cd "$(dirname "$0")/.."

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# gcc and Python's headers: the Triton language compiles what starts its kernels.
apt-get install -y -q --no-install-recommends \
    ca-certificates gcc libc6-dev libpython3.11 python3 python3-dev python3-pip

pip_install() {
    python3 -m pip install --break-system-packages --root-user-action=ignore --no-cache-dir \
        --disable-pip-version-check --no-input -q "$@"
}

pip_install --require-hashes -r constraints.txt
# TORCH is a list of pip's arguments.
# shellcheck disable=SC2086
pip_install ${TORCH:--r torch.txt}
pip_install --no-deps --require-hashes -r server.txt
apt-get clean
rm -rf /var/lib/apt/lists/*
