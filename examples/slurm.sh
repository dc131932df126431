#!/bin/bash
# A run of several nodes under Slurm that goes on by itself: sbatch examples/slurm.sh
#SBATCH --job-name=palsgd
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
# Two minutes before the time is over the workers are asked to leave: they save at the next sync.
#SBATCH --signal=TERM@120

set -uo pipefail

RUN=${RUN:-runs/stories} # on a disk that all nodes see, or a disk of each node's own
MOST_STARTS=20
INTERFACE=${INTERFACE:-} # the network between the nodes, for instance ib0; empty: gloo's choice

if [ -n "$INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60 # longer than the 25 s in which workers save and leave
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --resume also begins a run that is not there yet.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 1 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-endpoint "$first:29400" \
    --max-restarts 3 \
    -m palsgd train stories \
    --workers "$SLURM_NNODES" \
    --timeout 300 \
    --resume \
    --quiet \
    --out "$RUN"
code=$?

# A run without a summary has not come to its end: its time was over, or a node was lost.
if [ ! -e "$RUN/summary.json" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MOST_STARTS" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
