#!/usr/bin/env bash
# Differences that docs/crystal_kv.md and docs/appendix/crystal_kv.md quote and no table shows. Nothing is generated: the
# answers are in docs/results/pool.jsonl.gz. Run it in the checkout: bash docs/appendix/crystal_kv.sh
set -euo pipefail
differences() { python -m minithink.bench differences "$@"; }
EQUAL=crystal_kv_lite:protect_prompt=true
RANDOM_EVICTION=random:protect_prompt=true

# Right answers
differences crystal-kv crystal_kv $EQUAL
differences crystal-kv $EQUAL $RANDOM_EVICTION
differences crystal-kv window:protect_prompt=true $EQUAL
differences crystal-kv rkv:buffer=16,protect_prompt=true rkv:buffer=16 --budgets 0.5
differences crystal-kv raas $EQUAL --budgets 0.25
for policy in snapkv_decode:buffer=16,protect_prompt=true ada_snapkv:buffer=16,floor=0.8,protect_prompt=true \
    h2o:recent=0.75,protect_prompt=true; do
  differences crystal-kv $policy $RANDOM_EVICTION --budgets 0.25
done

# A floor, and damping
for floor in 128 256; do
  differences crystal-kv-floor crystal_kv:min_budget=$floor crystal_kv
done
differences crystal-kv-damping crystal_kv:damping=1 crystal_kv

# On the backbone
differences transfer crystal_kv_lite:p=0.5 crystal_kv:p=0.5 --checkpoint 6703513649b7e356 --budgets 0.5
differences transfer raas crystal_kv_lite:p=0.5 --checkpoint 6703513649b7e356 --budgets 0.25
