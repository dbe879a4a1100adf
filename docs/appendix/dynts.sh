#!/usr/bin/env bash
# Differences that docs/dynts.md and docs/appendix/dynts.md quote and no table shows. Nothing is generated: the answers are
# in docs/results/pool.jsonl.gz. Run it in the checkout: bash docs/appendix/dynts.sh
set -euo pipefail
differences() { python -m minithink.bench differences "$@"; }
SAME=schedule=share:0.3/0.4,protect_prompt=true  # evict when DynTS does, as many tokens
SKIPKV=skipkv:tau=0.9,at=boundary,$SAME
RKV=rkv:$SAME
OFTEN=rkv:buffer=16,protect_prompt=true  # evict every 16 tokens
SKIPKV_OFTEN=skipkv:schedule=interval:16,tau=0.9,at=boundary

# DynTS beside others at the same triggers
differences dynts dynts $SKIPKV
differences dynts dynts $RKV
differences dynts dynts rkv:recent=0.69,$SAME
differences dynts dynts window:$SAME
differences dynts dynts sepllm:fill=true,separators=1000,window=1,initial=0,$SAME
differences dynts dynts h2o:recent=0.69,$SAME
differences dynts dynts snapkv_decode:recent=0.69,$SAME
differences dynts dynts random_attention:buffer=16,$SAME --other-in baselines-sawtooth

# The local window of the paper
differences dynts $RKV rkv:recent=0.69,$SAME
differences dynts snapkv_decode:buffer=16,$SAME snapkv_decode:recent=0.69,$SAME
differences dynts h2o:recent=0.69,$SAME h2o:recent=0.75,$SAME

# Evictions every 16 tokens
differences baselines $OFTEN $RKV --other-in dynts --budgets 0.25,0.5
differences baselines $SKIPKV_OFTEN $SKIPKV --other-in dynts --budgets 0.25,0.5

# Windows, targets and scores
for without in ratio=0 local=0 question=false select=random; do
  differences dynts dynts dynts:$without --other-in dynts-ablation
done
differences dynts-ablation dynts:select=random dynts:select=bottom
differences dynts-ablation dynts:select=random random:$SAME --other-in dynts
differences dynts-ablation dynts:select=bottom window:$SAME --other-in dynts
differences dynts-ablation dynts:select=bottom dynts:ratio=0
differences dynts dynts:target=needs dynts
differences dynts dynts:target=needs needs_oracle
differences dynts dynts:target=hindsight window:$SAME
differences dynts hindsight_oracle dynts
differences dynts hindsight_oracle dynts:target=hindsight
differences dynts answer_oracle dynts
differences dynts-windows dynts:local=0.1,ratio=0.7 dynts:local=0.6,ratio=0.3
differences dynts-windows dynts:local=0.4,ratio=0.7 dynts:local=0.4,ratio=0.3

# Equal bytes, on straight lines between DynTS's budgets; and equal budgets
differences dynts $SKIPKV dynts --other-in baselines --same-bytes
differences dynts $RKV dynts --other-in baselines --same-bytes
differences dynts dynts:target=needs $SKIPKV
