#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=02:00:00
#SBATCH --output=grpo-%j.log

# One task on each node; accelerate starts one process for each of its GPUs. Submit from the repository's root:
#     sbatch configs/slurm_grpo.sh --model /path/to/your/model --steps 200
set -euo pipefail

GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-4}
MAIN=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Two jobs on one node must not share a port; the job's number tells them apart.
PORT=$((20000 + SLURM_JOB_ID % 20000))
export MAIN PORT GPUS_PER_NODE

# Each task asks for its own rank: SLURM_NODEID is set on the node, not here.
srun bash -c '
    unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
    exec .venv/bin/accelerate launch \
        --config_file configs/accelerate_nodes.yaml \
        --num_machines "$SLURM_NNODES" \
        --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) \
        --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$MAIN" \
        --main_process_port "$PORT" \
        configs/train_grpo.py "$@"
' bash "$@"
