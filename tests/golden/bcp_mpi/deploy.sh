#!/bin/bash
# deploy: deploy_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# How the processes of a step find each other.
export NGC_ARRAY_TYPE=MPIJob

# Step 1 of 1: start_server
exec bcprun \
    --nnodes 2 --npernode 1 \
    --launcher 'mpirun --allow-run-as-root' \
    --workdir /mount/results/jobs/deploy \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env CUDA_VISIBLE_DEVICES=0 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.start_server --settings /mount/results/jobs/deploy/deploy_gpt3_126m_hydra.yaml'
