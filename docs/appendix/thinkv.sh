#!/usr/bin/env bash
# Differences that docs/thinkv.md and docs/appendix/thinkv.md quote and no table shows. Nothing is generated: the answers
# are in docs/results/pool.jsonl.gz. Run it in the checkout: bash docs/appendix/thinkv.sh
set -euo pipefail
differences() { python -m minithink.bench differences "$@"; }
RKV=rkv:buffer=16,protect_prompt=true
RANDOM_ATTENTION=random_attention:buffer=16

# Equal bytes: R-KV has the smallest budget that takes at least 95 % of ThinKV's bytes
differences main thinkv $RKV --other-in main main-few --budgets 0.125 --at 0.03125
differences main thinkv $RKV --other-in main main-few --budgets 0.25 --at 0.03125
differences main thinkv $RKV --other-in main main-few --budgets 0.5 --at 0.03125,0.03125,0.125
differences main thinkv $RKV --other-in main main-few --budgets 0.75 --at 0.0625,0.03125,0.25

# Equal budgets
differences main thinkv $RANDOM_ATTENTION

# Eviction or bits
differences main tbe thinkv:types=1
differences main thinkv:types=1 thinkv
differences main tbe random:protect_prompt=true --other-in baselines
differences main tbe tbe --budgets 0.75 --at 0.25
differences main thinkv:types=1 thinkv:types=1 --budgets 0.75 --at 0.25
differences main thinkv thinkv --budgets 0.75 --at 0.25
differences precision thinkv:precision=R4E4T4 thinkv:precision=R4E4T4 --budgets 0.75 --at 0.25
differences main thinkv tbq --budgets 0.5

# Other ways to use few bits
differences combined quant:fmt=tq2 thinkv --at 0.5
differences combined random_attention:buffer=16+quant:fmt=nvfp4 thinkv --budgets 0.25
differences combined rkv:buffer=16,lam=0.3,protect_prompt=true+quant:fmt=tq4 thinkv --budgets 0.25
differences combined rkv:buffer=16,lam=0.3,protect_prompt=true+quant:fmt=tq4 thinkv --checkpoint 6703513649b7e356 --budgets 0.25
differences main thinkv kivi --budgets 0.75

# Other settings
differences types thinkv:types=1 thinkv:precision=R4E4T4 --other-in precision
differences types thinkv:types=2 thinkv:precision=R4E4T4 --other-in precision
differences key-axis tbq:key_axis=channel tbq
