#!/bin/bash
# export: export_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# How the processes of a step find each other.
export NGC_ARRAY_TYPE=MPIJob

# Step 1 of 2: convert_checkpoint
bcprun \
    --nnodes 1 --npernode 1 \
    --workdir /mount/results/jobs/export \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.convert_checkpoint --settings /mount/results/jobs/export/export_gpt3_126m_hydra.yaml'

# Step 2 of 2: write_model_repository
exec bcprun \
    --nnodes 1 --npernode 1 \
    --workdir /mount/results/jobs/export \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.write_model_repository --settings /mount/results/jobs/export/export_gpt3_126m_hydra.yaml'
