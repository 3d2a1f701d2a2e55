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
export LAUNCHER_LATER_STEPS=judge,measure_accuracy,measure_speed,start_server

# Containers of jobs that were killed before they could remove them.
remove_leftovers() {
    local active name
    active=$(squeue --noheader --format=%A --states=PD,CF,R,S,ST,CG --user="$(id -u)") || return 0
    for name in $(enroot list); do
        if [[ $name =~ ^"launcher_${SLURM_CLUSTER_NAME}_"([0-9]+)_[0-9]+_[0-9]+$ ]] \
            && ! grep -qx "${BASH_REMATCH[1]}" <<< "$active"; then
            echo "removing the container $name, which an ended job has left on $SLURMD_NODENAME"
            enroot remove --force "$name" || true
        fi
    done
}

# Run a command in a container of this task's own, which is removed at the end. A signal reaches
# the command as well; this shell outlives it to remove the container, which no second signal stops.
in_container() {
    set -euo pipefail
    container="launcher_${SLURM_CLUSTER_NAME}_${SLURM_JOB_ID}_${SLURM_STEP_ID}_${SLURM_PROCID}"
    local folder said variable code=0
    trap 'trap "" HUP INT TERM; enroot remove --force "$container" || true' EXIT
    trap : HUP INT TERM
    remove_leftovers
    # Unpacking says much, which matters only where it fails. A job that is started a second time may
    # find the container that it had.
    said=$(enroot create --force --name "$container" /images/inference.sqsh 2>&1) || {
        code=$?
        echo "$said" >&2
        return "$code"
    }

    # Rank and rendezvous of the task, as the hooks of enroot for PMI and PyTorch would give them.
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}
    MASTER_PORT=${MASTER_PORT:-$((61000 + SLURM_JOB_ID % 4536))}
    WORLD_SIZE=${WORLD_SIZE:-$SLURM_NTASKS} RANK=${RANK:-$SLURM_PROCID}
    LOCAL_RANK=${LOCAL_RANK:-$SLURM_LOCALID}
    export MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK
    # What Slurm says of the task and its GPUs, and what the job was submitted with for the
    # network and for clouds; anything else is the image's.
    local passed='^(SLURM|PMIX|PMI|NCCL|UCX|GLOO|HF|AWS|AZURE|GOOGLE)_'
    passed+='|^(SLURMD_NODENAME|CUDA_VISIBLE_DEVICES)$'
    local options=()
    for variable in MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK PYTHONPATH PYTHONUNBUFFERED TRANSFORMERS_OFFLINE LAUNCHER_LATER_STEPS \
        $(compgen -e | grep -E "$passed"); do
        options+=(--env "$variable")
    done
    for folder in "${PMIX_SERVER_TMPDIR:-}" \
        "${PMIX_SYSTEM_TMPDIR:-/tmp}"/spmix_appdir_*"${SLURM_JOB_ID}.${SLURM_STEP_ID}"; do
        if [ -d "$folder" ]; then
            options+=(--mount "$folder:$folder:none:x-create=dir,rbind")
        fi
    done

    enroot start "${options[@]}" \
        --mount /models:/models:none:x-create=auto,rbind,ro,nosuid \
        --mount /opt/NeMo-Megatron-Launcher:/opt/NeMo-Megatron-Launcher:none:x-create=auto,rbind \
        --mount /mount/results:/mount/results:none:x-create=auto,rbind \
        "$container" "$@" || code=$?
    return "$code"
}
export -f in_container remove_leftovers

# Step 1 of 1: convert_checkpoint, then write_model_repository
exec srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/export \
    bash -c 'in_container "$@"' bash \
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
