#!/bin/bash
# evaluate: evaluate_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# Step 1 of 3: measure_accuracy
bcprun \
    --nnodes 1 --npernode 1 \
    --workdir /mount/results/gpt3_126m/jobs/001 \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.measure_accuracy --settings /mount/results/gpt3_126m/jobs/001/evaluate_gpt3_126m_hydra.yaml'

# Step 2 of 3: measure_speed
bcprun \
    --nnodes 1 --npernode 1 \
    --workdir /mount/results/gpt3_126m/jobs/001 \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.measure_speed --settings /mount/results/gpt3_126m/jobs/001/evaluate_gpt3_126m_hydra.yaml'

# Step 3 of 3: judge
exec bcprun \
    --nnodes 1 --npernode 1 \
    --workdir /mount/results/gpt3_126m/jobs/001 \
    --env PYTHONPATH=/opt/NeMo-Megatron-Launcher \
    --env PYTHONUNBUFFERED=1 \
    --env TRANSFORMERS_OFFLINE=1 \
    --cmd 'python3 -m launcher_scripts.steps.judge --settings /mount/results/gpt3_126m/jobs/001/evaluate_gpt3_126m_hydra.yaml'
