#!/usr/bin/env bash
# Differences that docs/appendix/baselines.md quotes and no table shows. Nothing is generated: the
# answers are in docs/results/pool.jsonl.gz. Run it in the checkout: bash docs/appendix/baselines.sh
set -euo pipefail
differences() { python -m minithink.bench differences "$@"; }
RKV=rkv:buffer=16,protect_prompt=true
SKIP=skipkv:schedule=interval:16,tau=0.9,at=boundary
LOTS=random_attention:buffer=16

# All policies
differences baselines $SKIP $LOTS
differences baselines tova:protect_prompt=true random:protect_prompt=true --budgets 0.75
differences baselines thinkv $RKV --budgets 0.5 --at 0.125

# Prompts that are not protected
differences baselines $RKV rkv:buffer=16 --other-in baselines-unprotected --budgets 0.25

# DynTS's triggers
differences baselines-sawtooth tova:schedule=share:0.3/0.4,protect_prompt=true tova:protect_prompt=true --other-in baselines

# Random eviction with a window
differences lots $LOTS random:protect_prompt=true
differences lots $LOTS random_attention:buffer=16,schedule=interval:1

# Texts that repeat themselves
differences redundancy window:protect_prompt=true random:protect_prompt=true --families search:2 --less search:0
