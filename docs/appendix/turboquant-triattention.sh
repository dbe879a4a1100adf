#!/usr/bin/env bash
# Differences that docs/turboquant-triattention.md quotes and no table shows. Nothing is generated: the answers are in
# docs/results/pool.jsonl.gz. Run it in the checkout: bash docs/appendix/turboquant-triattention.sh
set -euo pipefail
differences() { python -m minithink.bench differences "$@"; }
BACKBONE=6703513649b7e356  # hash of the weights of smollm2-think
CONTROL=bebeaf9a641634e6   # of the embedded model's control
RKV=rkv:buffer=16,lam=0.3,protect_prompt=true
TRIATTENTION=triattention:buffer=16,share=layers
TQ4=quant:fmt=tq4
NVFP4=quant:fmt=nvfp4

# `tq4` beside other formats
differences combined $TRIATTENTION+$TQ4 $TRIATTENTION+$NVFP4 --checkpoint $BACKBONE --budgets 0.25,0.5
differences combined $RKV+$TQ4 $RKV+$NVFP4 --checkpoint $CONTROL --budgets 0.25
differences combined thinkv:four=tq4,two=tq2 thinkv --checkpoint $BACKBONE --budgets 0.25
differences combined $NVFP4 $TQ4 --checkpoint $BACKBONE

# By family
differences combined $RKV $RKV+$TQ4 --checkpoint $BACKBONE --budgets 0.25
differences combined $TRIATTENTION $RKV --checkpoint $BACKBONE --budgets 0.25
