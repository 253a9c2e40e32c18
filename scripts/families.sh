#!/usr/bin/env bash
# Every learned family for one target, on the same answers, compared in one run:
#
#     bash scripts/families.sh
#
# The shipped answers are read once by the target, and each family is trained from the stored features for as many epochs
# as the others; then every drafter gets the fastest tree for this machine, and all of them take turns on held-out
# prompts, greedy and at temperature 1. Hours on two CPU cores. Every step is skipped when its result is already there,
# and an interrupted one goes on where it stopped. To start over, remove outputs/families.
#
# Settings, all optional: OUT (where results go), TARGET, DTYPE (bfloat16, or float32 on a CPU without instructions for
# it), EPOCHS, VOCABULARY (how many tokens drafters can guess), PROMPTS, NEW_TOKENS and TEMPERATURES (to measure), STEPS
# (any of "capture train tune bench"), FAMILIES (names of files in configs/), and JOBS (how many to train at once).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

OUT="${OUT:-outputs/families}"
TARGET="${TARGET:-.cache/smollm2-135m-instruct}"
EPOCHS="${EPOCHS:-2}"
VOCABULARY="${VOCABULARY:-6144}"
PROMPTS="${PROMPTS:-60}"
NEW_TOKENS="${NEW_TOKENS:-128}"
JOBS="${JOBS:-1}"
TEMPERATURES="${TEMPERATURES:-0 1}"
STEPS="${STEPS:-capture train tune bench}"
DATA=(distill/data/smollm2_answers{,_sharealike}.jsonl.gz distill/data/smollm2_more_answers{,_sharealike}.jsonl.gz)
read -ra FAMILIES <<<"${FAMILIES:-medusa hydra hydra_pp eagle eagle_hass eagle3 redrafter mlp mtp}"

wanted() {
    [[ " $STEPS " == *" $1 "* ]]
}

# 1. The environment and the target.
ensure_environment demo
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
DTYPE="${DTYPE:-$(fast_dtype)}"
BF16="$([ "$DTYPE" = bfloat16 ] && echo true || echo false)"
[ "$TARGET" != .cache/smollm2-135m-instruct ] || python scripts/reference_target.py "$TARGET"

# 2. One pass of the target over all answers; its states after blocks 1, 14 and 26 are what EAGLE-3 reads.
if wanted capture; then
    say "the target's features of all answers: $OUT/features"
    headstart distill capture --target "$TARGET" --dtype "$DTYPE" --data "${DATA[@]}" --max_length 768 \
        --layers final,1,14,26 --out "$OUT/features"
fi

# 3. Every family as its file says, but for what they must share to be compared: data, vocabulary, epochs, tree size.
train() {
    local family="$1"
    say "training $family"
    headstart train "${family%%_*}" --config "configs/$family.yaml" --features "$OUT/features" --train_data "${DATA[@]}" \
        --draft_vocab_size "$VOCABULARY" --num_train_epochs "$EPOCHS" --tree_nodes 12 --eval_strategy no \
        --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --packing true \
        --target_dtype "$DTYPE" --bf16 "$BF16" --output_dir "$OUT/$family"
}

if wanted train; then
    if [ "$JOBS" = 1 ]; then
        for family in "${FAMILIES[@]}"; do train "$family"; done
    else # small products gain little from a second thread: whole runs side by side are faster
        threads=$(($(nproc) / JOBS > 0 ? $(nproc) / JOBS : 1))
        failed=""
        trap 'kill $(jobs -rp) 2>/dev/null || true' EXIT # in the background they do not get Ctrl-C; stopped, they save
        for family in "${FAMILIES[@]}"; do
            while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || failed=yes; done
            OMP_NUM_THREADS="$threads" train "$family" >"$OUT/$family.log" 2>&1 &
            say "training $family with $threads threads: $OUT/$family.log"
        done
        while [ -n "$(jobs -rp)" ]; do wait -n || failed=yes; done
        [ -z "$failed" ] || fail "a family could not be trained; see the logs in $OUT, then run this again"
    fi
fi

# 4. EAGLE-2 is EAGLE-1's drafter with a tree that follows its confidence; EAGLE-3 gets as many nodes as the others.
# Static trees are tuned to this machine.
twin_of() {
    case "$1" in eagle) echo eagle2 ;; eagle_hass) echo eagle2_hass ;; eagle3) echo eagle3 ;; esac
}

if wanted tune; then
    for family in "${FAMILIES[@]}"; do
        [ -z "$(twin_of "$family")" ] || python - "$OUT/$family" "$OUT/$(twin_of "$family")" <<'PYTHON'
import sys
from headstart import AutoDrafter
from headstart.core.tree import DynamicTree

drafter = AutoDrafter.from_pretrained(sys.argv[1])
drafter.set_dynamic_tree(DynamicTree(nodes=12, depth=5, width=4))
drafter.save_pretrained(sys.argv[2])
PYTHON
        case "$family" in eagle3 | redrafter) continue ;; esac # these draw trees of their own
        for temperature in $TEMPERATURES; do
            [ ! -f "$OUT/tune/$family-$temperature.json" ] || continue
            say "tuning $family at temperature $temperature"
            headstart tune --target "$TARGET" --drafter "$OUT/$family" --dtype "$DTYPE" --temperature "$temperature" \
                --num_prompts 12 --max_new_tokens 48 --contexts 128 --proof_prompts 6 --rounds 10 \
                --json "$OUT/tune/$family-$temperature.json"
        done
    done
fi

# 5. All in turn on the same prompts, with the tree from training and the tuned one, the target alone among them.
if wanted bench; then
    drafters=""
    for family in "${FAMILIES[@]}"; do
        drafters+="$OUT/$family,"
        case "$family" in eagle | eagle_hass) drafters+="$OUT/$(twin_of "$family")," ;; esac
    done
    for temperature in $TEMPERATURES; do
        [ ! -f "$OUT/bench-$temperature.json" ] || continue
        say "benchmark at temperature $temperature"
        headstart bench --target "$TARGET" --dtype "$DTYPE" --num_prompts "$PROMPTS" --max_new_tokens "$NEW_TOKENS" \
            --drafters "$drafters" --temperature "$temperature" --trees both --costs \
            --json "$OUT/bench-$temperature.json" --plots "$OUT/plots-$temperature"
    done
fi
