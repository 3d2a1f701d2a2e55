#!/bin/bash
# watch: watch_gpt3_126m
#SBATCH --job-name=nemo-megatron-watch_gpt3_126m
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/mount/results/gpt3_126m/jobs/001/log-watch_gpt3_126m_%j.out
#SBATCH --time=0:30:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# For a launcher that was killed before it could write the id, and as the time of this start.
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" > /mount/results/gpt3_126m/jobs/001/job_id || true

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1

# Step 1 of 1: watch
exec srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/gpt3_126m/jobs/001 \
    python3 -m launcher_scripts.steps.watch --settings /mount/results/gpt3_126m/jobs/001/watch_gpt3_126m_hydra.yaml
