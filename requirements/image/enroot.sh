#!/bin/sh
# Build the image of the Dockerfile beside this file with enroot, where there is no docker:
#
#   sh requirements/image/enroot.sh /shared/images/inference.sqsh
#
#   TORCH  pip's arguments for another torch than that of torch.txt
set -eu
if [ $# != 1 ] || [ -e "$1" ]; then
    echo "usage: sh requirements/image/enroot.sh NEW_FILE.sqsh" >&2
    exit 2
fi
requirements=$(cd "$(dirname "$0")/.." && pwd)
name=inference-$$
base=$1.base
partial=$1.partial
clean_up() {
    enroot remove --force "$name" || true
    rm -f "$base" "$partial"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
enroot import --output "$base" docker://debian:12-slim
enroot create --name "$name" "$base"
enroot start --root --rw --mount "$requirements:/opt/requirements" --env TORCH="${TORCH:-}" \
    "$name" sh /opt/requirements/image/packages.sh
enroot export --output "$partial" "$name"
mv "$partial" "$1"
