#!/bin/bash
# watch: watch_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# Step 1 of 1: watch
exec bcprun \
    --nnodes 1 --npernode 1 \
    --workdir /mount/results/gpt3_126m/jobs/001 \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.watch --settings /mount/results/gpt3_126m/jobs/001/watch_gpt3_126m_hydra.yaml'
