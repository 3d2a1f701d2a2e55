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

export PYTHONPATH=/opt/NeMo-Megatron-Launcher
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1
export LAUNCHER_LATER_STEPS=judge,measure_accuracy,measure_speed,run_gateway,start_server

# Step 1 of 1: convert_checkpoint, then write_model_repository
exec srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --container-image=/images/inference.sqsh \
    --container-mounts=/opt/NeMo-Megatron-Launcher:/opt/NeMo-Megatron-Launcher,/mount/results:/mount/results \
    --container-workdir=/mount/results/jobs/export \
    --no-container-mount-home \
    --container-env=PYTHONPATH,PYTHONUNBUFFERED,TRANSFORMERS_OFFLINE,LAUNCHER_LATER_STEPS \
    sh -c '
set -eu
cd /mount/results/jobs/export
python=python3
command -v "$python" > /dev/null || {
    echo "error: the container has no $python; got PATH=$PATH; change cluster.python (its path in the image)" >&2
    exit 127
}
python3 -m launcher_scripts.steps.convert_checkpoint --settings /mount/results/jobs/export/export_gpt3_126m_hydra.yaml
exec python3 -m launcher_scripts.steps.write_model_repository --settings /mount/results/jobs/export/export_gpt3_126m_hydra.yaml
'
