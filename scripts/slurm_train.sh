#!/usr/bin/env bash
#SBATCH --job-name=draftsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%j.log
# Multi-node distillation under Slurm (AWS ParallelCluster); the same command runs on one node or many:
#     sbatch --nodes=4 scripts/slurm_train.sh device=neuron draft=qwen3-32b-eagle3 \
#         parallel.tensor=8 parallel.draft=sharded optim.rows_per_step=256 output_dir=/fsx/outputs/train \
#         data=jsonl data.path=/fsx/answers.jsonl
# ENVIRONMENT=.venv-neuron   environment that scripts/setup_trn2.sh or setup_trn1.sh printed, in a shared folder; that of
#                            a DLAMI is below /opt on each node, so run setup_trn2.sh on all of them
# PROCESSES=64               per node: its logical cores (trn2.48xlarge 64, trn1.32xlarge 32)
# CACHE=/var/tmp/...         cache of compiled graphs; local to the node, which works on both routes
#
# There are three levels of recovery: torchrun restarts all workers from the last state when one dies; Slurm
# requeues the job when a node dies; five minutes before the time limit the job requeues itself. The run's folder
# must be on a shared file system that can rename (FSx for Lustre), not on a mounted bucket.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?error: run this script with sbatch}"

environment=${ENVIRONMENT:-.venv-neuron}
processes=${PROCESSES:-64}
cache=${CACHE:-/var/tmp/neuron-compile-cache}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
[[ -x $environment/bin/torchrun ]] || {
  echo "error: ENVIRONMENT: must be an environment with torchrun, got $environment;" \
    "set it to the folder that scripts/setup_trn2.sh or scripts/setup_trn1.sh printed, on every node" >&2
  exit 2
}

PATH=$(cd "$environment/bin" && pwd):$PATH # where PyTorch's backend looks for the compiler neuronx-cc
export PATH
export FI_PROVIDER=efa          # collectives between nodes go over EFA,
export FI_EFA_USE_DEVICE_RDMA=1 # from device memory to device memory
export FI_EFA_FORK_SAFE=1       # data loaders fork; needed on Amazon Linux 2 only
export DRAFTSMITH_LAUNCH="Slurm job $SLURM_JOB_ID" # resume=false starts over once, and not again after a requeue
# Otherwise the nodes use different rendezvous stores after a worker has died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

requeue() {
  echo "slurm_train: the time limit is near, requeueing job $SLURM_JOB_ID"
  kill -TERM "$run" 2>/dev/null || true
  wait "$run" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit
}
trap requeue USR1

# A compilation that was killed leaves its lock, for which later runs of device=xla would wait without end.
srun find "$cache" -name '*.hlo_module.pb.lock' -delete 2>/dev/null || true
srun --kill-on-bad-exit=1 "$environment/bin/torchrun" \
  --nnodes="$SLURM_NNODES" --nproc-per-node="$processes" --max-restarts=3 \
  --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-backend=c10d --rdzv-endpoint="$first:29400" \
  -m train device.cache_dir="$cache" "$@" &
run=$!
wait "$run"
