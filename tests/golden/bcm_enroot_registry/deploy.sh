#!/bin/bash
# deploy: deploy_gpt3_126m
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=nemo-megatron-deploy_gpt3_126m
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/mount/results/jobs/deploy/log-deploy_gpt3_126m_%j.out
#SBATCH --signal=B:USR1@120
#SBATCH --time=1-00:00:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# For a launcher that was killed before it could write the id, and as the time of this start.
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" > /mount/results/jobs/deploy/job_id || true

export PYTHONPATH=/opt/NeMo-Megatron-Launcher
export PYTHONUNBUFFERED=1
export MPLCONFIGDIR=/mount/results/gpt3_126m/evaluate_tp2_pp1_auto_auto/matplotlib_cache
export TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=/mount/results/gpt3_126m/deploy_tp2_pp1_auto_auto/triton_cache

# The image is fetched once for all nodes and jobs.
mkdir -p /mount/results/images
(
    flock 9
    if [ ! -e /mount/results/images/nvcr.io+nvidia+nemo+23.sqsh ]; then
        rm -f /mount/results/images/nvcr.io+nvidia+nemo+23.sqsh.partial
        enroot import --output /mount/results/images/nvcr.io+nvidia+nemo+23.sqsh.partial 'docker://nvcr.io#nvidia/nemo:23'
        mv /mount/results/images/nvcr.io+nvidia+nemo+23.sqsh.partial /mount/results/images/nvcr.io+nvidia+nemo+23.sqsh
    fi
) 9> /mount/results/images/nvcr.io+nvidia+nemo+23.sqsh.lock

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
    said=$(enroot create --force --name "$container" /mount/results/images/nvcr.io+nvidia+nemo+23.sqsh 2>&1) || {
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
    for variable in MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK PYTHONPATH PYTHONUNBUFFERED MPLCONFIGDIR TRANSFORMERS_OFFLINE TRITON_CACHE_DIR \
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
        --mount /opt/NeMo-Megatron-Launcher:/opt/NeMo-Megatron-Launcher:none:x-create=auto,rbind \
        --mount /mount/results:/mount/results:none:x-create=auto,rbind \
        "$container" "$@" || code=$?
    return "$code"
}
export -f in_container remove_leftovers

# The server is a step of this job; the result of the client is the result of the job.
server_log=/mount/results/jobs/deploy/server-deploy_gpt3_126m_"$SLURM_JOB_ID".out
server_state() {
    if kill -0 "$server" 2> /dev/null; then echo RUNNING; else echo ENDED; fi
}
signal_server() {
    if [ "$1" = KILL ]; then
        # A signal to srun kills its tasks.
        kill "$server" 2> /dev/null || true
    else
        # To every step: which of them is the server's is not known from their numbers.
        scancel --quiet --signal="$1" "$SLURM_JOB_ID" || true
    fi
}
living='^(COMPLETING|CONFIGURING|PENDING|REQUEUED|REQUEUE_HOLD|RESIZING|RUNNING|SIGNALING|STAGE_OUT|STOPPED|SUSPENDED|UNKNOWN)$'
server_lives() {
    server_state | grep -qE "$living"
}
server_ended() {
    server_state | grep -qvE "$living"
}
# A handler runs to its end: none of its commands decides the exit code.
stop_client() {
    set +e
    if [ -n "$client" ]; then
        kill "$client" 2> /dev/null
        wait "$client"
    fi
    client=
}
# Print why the job fails, as its last words: below those of the client where it has failed.
explain() {
    set +e
    local log
    if server_ended; then
        for log in "$server_log"; do
            if [ -e "$log" ]; then
                echo "the end of the server's log $log:"
                tail -n 20 "$log" | sed 's/^/  | /'
            else
                echo "the server has not started: there is no log $log"
            fi
        done
    fi
    echo "error: $1 (server: $(echo $(server_state)); its log: $server_log)"
} >&2
# True if this run of the job has reached a verdict: the exit codes 1 and 2 of a program that
# failed are none.
has_verdict() {
    [ /mount/results/verdict.json -nt /mount/results/jobs/deploy/job_id ]
}

# Run a command while the server runs; the server's end is the end of the command as well.
client=
beside_server() {
    local checked=$SECONDS code=0
    if server_ended; then
        explain "the server ended before the evaluation started"
        exit 3
    fi
    "$@" &
    client=$!
    while kill -0 "$client" 2> /dev/null; do
        if ((SECONDS - checked >= 1)); then
            checked=$SECONDS
            if server_ended && kill -0 "$client" 2> /dev/null; then
                stop_client
                explain "the server ended before the evaluation did"
                exit 3
            fi
        fi
        sleep 0.2
    done
    wait "$client" || code=$?
    client=
    if [ "$code" != 0 ]; then
        explain "the evaluation ended with exit code $code"
        if ((code <= 2)) && ! has_verdict; then
            echo "error: it reached no verdict" >&2
            exit 3
        fi
        exit "$code"
    fi
}

# At the end, whatever the reason: no client is left, and the server is stopped in order.
clean_up() {
    set +e
    trap '' USR1 TERM
    if [ -n "$client" ]; then kill "$client" 2> /dev/null; fi
    signal_server TERM
    local deadline=$((SECONDS + 110))
    while server_lives && ((SECONDS < deadline)); do
        sleep 0.2
    done
    if server_lives; then signal_server KILL; fi
}
trap clean_up EXIT
trap 'echo "error: the time limit or a preemption ends this job" >&2; exit 3' USR1
trap 'exit 143' TERM

# The server
srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --gpus-per-node=2 \
    --output=/mount/results/jobs/deploy/server-deploy_gpt3_126m_%j.out --open-mode=append \
    --chdir=/mount/results/jobs/deploy \
    bash -c 'in_container "$@"' bash \
    sh -c '
set -eu
cd /mount/results/jobs/deploy
python=python3
command -v "$python" > /dev/null || {
    echo "error: the container has no $python; got PATH=$PATH; change cluster.python (its path in the image)" >&2
    exit 127
}
exec python3 -m launcher_scripts.steps.start_server --settings /mount/results/jobs/deploy/deploy_gpt3_126m_hydra.yaml
' &
server=$!

# Step 1 of 1: measure_accuracy, then measure_speed, then judge
beside_server srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/evaluate \
    bash -c 'in_container "$@"' bash \
    sh -c '
set -eu
cd /mount/results/jobs/evaluate
python=python3
command -v "$python" > /dev/null || {
    echo "error: the container has no $python; got PATH=$PATH; change cluster.python (its path in the image)" >&2
    exit 127
}
python3 -m launcher_scripts.steps.measure_accuracy --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml
python3 -m launcher_scripts.steps.measure_speed --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml
exec python3 -m launcher_scripts.steps.judge --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml
'
