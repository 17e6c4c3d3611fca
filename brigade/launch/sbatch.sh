#!/bin/bash
@HEADER@
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@SLOTS@
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@@NOTICE@
##SBATCH --partition=NAME
##SBATCH --account=NAME
##SBATCH --time=24:00:00
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?start this file with sbatch}"
export PYTHON="${PYTHON:-.venv/bin/python}"
gpus="${SLURM_GPUS_PER_NODE:-@SLOTS@}" # what was asked for, "h100:8" too; an exclusive host has them all
export RANKS="${gpus##*:}"
# Where hosts have several networks, name the one to use:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

output=@OUTPUT@
command=(@COMMAND@ --output_dir "$output")

# Slurm gives notice @NOTICE@ s before the time limit, or before another job takes the hosts. SIGTERM goes to the step by
# scancel: srun itself would turn it into SIGKILL. A file is the only sure sign that all is done.
# shellcheck disable=SC2329 # trap calls it
queue_again() {
    trap '' USR1
    echo "$(date +%T) notice of the end: stopping the ranks"
    scancel --signal=TERM "$SLURM_JOB_ID" || true
    wait || true
    if [ -e "$output/success.json" ]; then exit 0; fi
    echo "$(date +%T) queued again; the run goes on from its newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap queue_again USR1

# The first host of the allocation is the meeting point; the port is this job's own, below the ephemeral ones.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${hosts%%$'\n'*}"
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
echo "$(date +%T) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)):" \
    "$SLURM_JOB_NUM_NODES hosts of $RANKS ranks, $MASTER_ADDR:$MASTER_PORT"

# Single quotes: each host fills in its own SLURM_NODEID. In double quotes this host would, and all would be rank 0.
# shellcheck disable=SC2016
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash -c 'exec "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$RANKS" \
        --node_rank "$SLURM_NODEID" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" @TORCHRUN_OPTIONS@ "$@"' \
    bash "${command[@]}" &
code=0
wait "$!" || code=$?

# Unless a site sets preempt_send_user_signal, Slurm tells the ranks alone that another job takes their hosts.
if [ "$code" != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then queue_again; fi
if [ "$code" = 0 ] && [ ! -e "$output/success.json" ]; then
    echo "error: the ranks ended without a word of failure, but there is no $output/success.json" >&2
    code=1
fi
exit "$code"
