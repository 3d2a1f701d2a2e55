#!/bin/bash
# ladder: ladder_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# Step 1 of 1: write_ladder
exec bcprun \
    --nnodes 1 --npernode 1 \
    --workdir /mount/results/jobs/ladder \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.write_ladder --settings /mount/results/jobs/ladder/ladder_gpt3_126m_hydra.yaml'
