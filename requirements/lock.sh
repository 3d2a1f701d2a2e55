#!/bin/sh
# Write constraints.txt (what jobs, the launcher and the quickstart need) and constraints-dev.txt (what
# tests and signatures need besides) anew: exact versions, with hashes, for Python 3.10 and later.
# Versions stay as they are unless uv's options ask for others: --upgrade, --upgrade-package NAME.
# torch and its CUDA packages are left out, so that a machine's own torch can take their place.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# compile FILE OPTION...: resolve FILE.in with the versions that FILE has, then drop what is left out.
compile() {
    name=$1
    shift
    uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate \
        --no-header --output-file "$work/$name" "$@" "$work/$name.in"
    awk '/^[a-z]/ { keep = !/^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z]*)==/ && !/== .(emscripten|win32)/ }
         /^[a-z ]/ && keep' "$work/$name" >"$work/$name.kept"
}

# publish FILE: the head, and the entries.
publish() {
    {
        echo "# Exact versions and hashes of $2. Made with: sh requirements/lock.sh (needs uv)"
        cat "$work/$1.kept"
    } >"$1"
}

cat login.txt torch.txt job.txt quickstart.txt >"$work/constraints.txt.in"
cp constraints.txt "$work/constraints.txt"
compile constraints.txt "$@"
cat "$work/constraints.txt.in" dev.txt sign.txt >"$work/constraints-dev.txt.in"
cat constraints-dev.txt "$work/constraints.txt" >"$work/constraints-dev.txt"
compile constraints-dev.txt --constraints "$work/constraints.txt" "$@"
# An entry of both files stays in the first.
awk 'FNR == NR { if (/^[a-z]/) known[$0] = 1; next }
     /^[a-z]/ { keep = !($0 in known) } keep' \
    "$work/constraints.txt.kept" "$work/constraints-dev.txt.kept" >"$work/new"
mv "$work/new" "$work/constraints-dev.txt.kept"
publish constraints.txt "what jobs, the launcher and the quickstart need, but torch"
publish constraints-dev.txt "what tests and signatures need besides"
