#!/usr/bin/env bash
# Differences that docs/transfer.md quotes and no table shows. Nothing is generated: the answers are in
# docs/results/pool.jsonl.gz. Run it in the checkout: bash docs/appendix/transfer.sh
set -euo pipefail
differences() { python -m minithink.bench differences "$@"; }
BACKBONE=6703513649b7e356  # hash of the weights of smollm2-think
CONTROL=bebeaf9a641634e6   # of the embedded model's control
WINDOW=window:schedule=interval:64,protect_prompt=true
RANDOM_ATTENTION=random_attention:buffer=16
RKV=rkv:buffer=16,lam=0.3,protect_prompt=true
SKIPKV=skipkv:schedule=interval:16,tau=0.9,at=boundary
UNSTEERED=skipkv:steering=false,schedule=interval:16,tau=0.9
KEYDIFF=keydiff:schedule=interval:16,recent=32,protect_prompt=true

# By family, or between two policies
differences transfer $RKV $RANDOM_ATTENTION --checkpoint $BACKBONE --budgets 0.25
differences transfer $SKIPKV $RKV --checkpoint $BACKBONE --budgets 0.25
differences transfer $SKIPKV $UNSTEERED --checkpoint $BACKBONE --budgets 0.25
differences transfer $KEYDIFF $SKIPKV --checkpoint $CONTROL --budgets 0.25

# At equal bytes
differences transfer $WINDOW $RANDOM_ATTENTION --checkpoint $BACKBONE --budgets 0.25 --same-bytes
differences transfer $SKIPKV $WINDOW --checkpoint $BACKBONE --budgets 0.125,0.25 --same-bytes
differences transfer $SKIPKV $RKV --checkpoint $BACKBONE --budgets 0.25 --same-bytes
