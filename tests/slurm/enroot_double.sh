#!/bin/bash
# Stands in for enroot: notes every call in $ENROOT_CALLS, keeps a container as a folder of its node
# below $ENROOT_CALLS.nodes until it is removed, and runs the command of a start on the host.
# Unpacking and removing take $ENROOT_SECONDS. What it says is what enroot 4.1 says.
set -euo pipefail
containers=$ENROOT_CALLS.nodes/$SLURMD_NODENAME
mkdir -p "$containers"
line="$SLURMD_NODENAME $*"
printf '%s\n' "${line//$'\n'/ }" >> "$ENROOT_CALLS"
fail() {
    echo "[ERROR] $*" >&2
    exit 1
}
command=$1
shift
case $command in
    import)
        [ "$1" = --output ]
        [ ! -e "$2" ] || fail "File already exists: $2"
        echo "$3" > "$2"
        ;;
    create)
        force=
        if [ "$1" = --force ]; then force=1; shift; fi
        [ "$1" = --name ]
        [ -e "$3" ] || fail "No such file or directory: $3"
        [ -s "$3" ] || fail "Invalid image format: $3"
        if [ -n "$force" ]; then rm -rf "${containers:?}/$2"; fi
        mkdir "$containers/$2" || fail "File already exists: $containers/$2"
        sleep "${ENROOT_SECONDS:-0.2}"
        {
            echo "[INFO] Extracting squashfs filesystem..."
            echo
            echo "Parallel unsquashfs: Using 64 processors"
            echo "11003 inodes (12345 blocks) to write"
            echo
            for kind in files directories symlinks devices fifos sockets hardlinks; do
                echo "created 100 $kind"
            done
        } >&2
        ;;
    list) ls -1 "$containers" ;;
    remove)
        [ "$1" = --force ]
        [ -d "$containers/$2" ] || fail "No such file or directory: $containers/$2"
        sleep "${ENROOT_SECONDS:-0.2}"
        rmdir "$containers/$2"
        ;;
    start)
        while [[ $1 = --env || $1 = --mount ]]; do
            source=${2%%:*}
            if [ "$1" = --mount ] && [ ! -e "$source" ]; then
                echo "enroot-mount: failed to mount: $source at $containers: No such file or directory" >&2
                exit 1
            fi
            shift 2
        done
        [ -d "$containers/$1" ] || fail "No such file or directory: $containers/$1"
        shift
        exec "$@"
        ;;
    *) exit 3 ;;
esac
