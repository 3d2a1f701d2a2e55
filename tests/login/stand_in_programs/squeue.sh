#!/bin/sh
# Stands in for squeue: the jobs that the stand-in for sbatch has queued without saying so.
cat "$CALLS.queue" 2> /dev/null || true
