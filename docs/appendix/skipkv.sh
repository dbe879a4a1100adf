#!/usr/bin/env bash
# Differences that docs/skipkv.md and docs/appendix/skipkv.md quote and no table shows. Nothing is generated: the answers
# are in docs/results/pool.jsonl.gz. Run it in the checkout: bash docs/appendix/skipkv.sh
set -euo pipefail
differences() { python -m minithink.bench differences "$@"; }
RKV=rkv:buffer=16,protect_prompt=true
BOTH=skipkv:schedule=interval:16,tau=0.9,at=boundary
ALONE=skipkv:schedule=interval:16,tau=0.9,steering=false
STEERING=skipkv:schedule=interval:16,skip=false,at=boundary
NEITHER=skipkv:schedule=interval:16,skip=false,steering=false

# Beside R-KV
differences skipkv $ALONE $RKV
differences skipkv $BOTH $RKV
differences skipkv $BOTH $ALONE
differences skipkv $BOTH seal+$RKV
differences skipkv seal+$RKV $RKV
differences skipkv seal+h2o:recent=0.75,protect_prompt=true h2o:recent=0.75,protect_prompt=true
differences skipkv skipkv:schedule=interval:16,form=paper,tau=0.9,at=boundary $BOTH
differences skipkv skipkv:schedule=interval:16,steering=false $RKV --budgets 0.25
differences skipkv h2o:recent=0.75,protect_prompt=true random:protect_prompt=true
differences redundancy $BOTH $RKV --budgets 448

# Each half alone
differences skipkv-parts $ALONE $NEITHER
differences skipkv-parts $STEERING $NEITHER
differences skipkv-parts $BOTH $NEITHER
differences skipkv-parts $BOTH $STEERING
differences skipkv-parts $BOTH $ALONE
differences skipkv-parts skipkv:schedule=interval:16,tau=0.9 $NEITHER
differences skipkv-parts skipkv:schedule=interval:16,tau=0.9 $ALONE --budgets 0.25 --families facts
differences skipkv-tau skipkv:schedule=interval:16,steering=false,tau=0.8 $NEITHER --other-in skipkv-parts --budgets 0.25

# What padding takes, and what grouping gives back
differences skipkv-padded $BOTH $BOTH --other-in skipkv-parts
differences skipkv-grouped $BOTH $BOTH --other-in skipkv-padded
differences skipkv-padded $RKV $RKV --other-in skipkv-parts
differences skipkv-grouped $RKV $RKV --other-in skipkv-padded

# On the backbone
differences transfer $BOTH skipkv:steering=false,schedule=interval:16,tau=0.9 --checkpoint 6703513649b7e356 --budgets 0.5
