#!/usr/bin/env bash
# Check training on several GPUs of this machine: `bash scripts/verify_gpus.sh`, or with fewer than all, `… 2`.
#
# The same checks as `bash scripts/test.sh -m distributed` makes with two processes on a CPU, here over nccl: plain
# data-parallel training, DeepSpeed ZeRO-2 and ZeRO-3, and FSDP2 give the drafter of one process with accumulated
# gradients, measure what it measures, go on from a checkpoint, keep frozen weights out of it, and stop together; joint
# training does the same under all but FSDP2; then the memory of a step, measured on the first GPU where a target is given:
#
#     HEADSTART_TARGET=.cache/smollm2-135m-instruct bash scripts/verify_gpus.sh
#
# Exit status: 0 all checks passed, 1 one failed, 3 this machine has no two GPUs to check.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# 1. Is there anything to check? Where no environment can run PyTorch yet, the driver's own list decides.
if ! command -v nvidia-smi >/dev/null 2>&1; then
    printf 'this machine has no NVIDIA GPU (there is no nvidia-smi), so nothing was checked\n' >&2
    exit 3
fi

# 2. The environment, with DeepSpeed.
ensure_environment deepspeed dev
cd "$ROOT"
found="$(python -c 'import torch; print(torch.cuda.device_count())')"
wanted="${1:-$found}"
if [ "$found" -lt 2 ] || [ "$wanted" -lt 2 ] || [ "$wanted" -gt "$found" ]; then
    printf 'these checks need 2 GPUs or more, PyTorch finds %s and %s were asked for, so nothing was checked\n' \
        "$found" "$wanted" >&2
    exit 3
fi

# 3. The checks. GPUs add up in an order of their own, so weights are compared within a tolerance, not to the bit.
say "training on $wanted GPUs"
export HEADSTART_GPUS="$wanted" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python -m pytest -m distributed tests/training -v

# 4. Memory of a step at 4 x 2,048 tokens.
if [ -n "${HEADSTART_TARGET:-}" ]; then
    say "memory of a step"
    python scripts/loss_memory.py --target "$HEADSTART_TARGET"
fi
say "all checks passed on $wanted GPUs"
