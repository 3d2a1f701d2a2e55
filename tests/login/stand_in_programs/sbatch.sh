#!/bin/bash
# Stands in for sbatch: notes its arguments in the file $CALLS, keeps the script, gives an id.
# ASKS sends that signal to the launcher at the second job; REFUSE makes it fail, LATE as well
# although squeue knows the job then; it also fails when it inherits the variables of a job.
printf '%s\n' "$*" >> "$CALLS"
for script in "$@"; do :; done
cp "$script" "$CALLS.$(wc -l < "$CALLS").sh"
if [ -n "${ASKS:-}" ] && [ "$(wc -l < "$CALLS")" = 2 ]; then
    kill -s "$ASKS" "$PPID"
    exit 1
fi
if [ -n "${REFUSE:-}" ]; then
    echo "sbatch: error: invalid partition specified" >&2
    exit 1
fi
[ -z "${SLURM_NTASKS:-}" ] || exit 3
if [ -n "${LATE:-}" ]; then
    echo "107 $script" > "$CALLS.queue"
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
    exit 1
fi
echo "Submitted batch job $((100 + $(wc -l < "$CALLS")))"
