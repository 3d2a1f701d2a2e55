#!/bin/bash
# export: export_gpt3_126m
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=nemo-megatron-export_gpt3_126m
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/mount/results/jobs/export/log-export_gpt3_126m_%j.out
#SBATCH --time=2:00:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# For a launcher that was killed before it could write the id, and as the time of this start.
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" > /mount/results/jobs/export/job_id || true

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1

# Step 1 of 2: convert_checkpoint
srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/export \
    python3 -m launcher_scripts.steps.convert_checkpoint --settings /mount/results/jobs/export/export_gpt3_126m_hydra.yaml

# Step 2 of 2: write_model_repository
exec srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/export \
    python3 -m launcher_scripts.steps.write_model_repository --settings /mount/results/jobs/export/export_gpt3_126m_hydra.yaml
