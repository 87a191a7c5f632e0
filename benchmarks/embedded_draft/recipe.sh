# How the embedded draft was made: texts of the target, a draft, and the same draft without Markov head to compare.
# On one H200 the four `synthesize` ran side by side (66,000 tokens/s, with tests beside them) and were stopped after
# 300 s: what follows used the 6, 6, 7 and 3 batches that each had finished (56,315 conversations, 21.5 M tokens), as
# one file of `input_ids` and `loss_mask`. Training took about 62 ms a step, the two drafts on a GPU each.
set -e
cd "$(dirname "$0")"
python prompts.py prompts.jsonl --count 120000 --seed 11
split -n l/3 --additional-suffix=.jsonl prompts.jsonl prompts_
common="--temperatures 0 --temperatures 0.7 --temperatures 0 --temperatures 1.0 --max-length 640 --max-answer-tokens 384 --batch-size 320"
hf-dspark synthesize --output aa.jsonl --prompts prompts_aa.jsonl --seed 1 $common
hf-dspark synthesize --output ab.jsonl --prompts prompts_ab.jsonl --seed 3 $common
hf-dspark synthesize --output ac.jsonl --prompts prompts_ac.jsonl --seed 5 $common
hf-dspark synthesize --output own.jsonl --num-own 60000 --turns 3 --seed 2 --user-temperature 0.9 $common
cat aa.jsonl ab.jsonl ac.jsonl own.jsonl > texts.jsonl
train="hf-dspark train --data texts.jsonl --max-length 640 --num-hidden-layers 3 --batch-size 48 --num-anchors 64 --max-steps 4800 --num-validation-texts 192 --validate-every 5000 --save-every 5000 --keep-checkpoints 1 --log-every 100"
$train --output-dir runs/markov --markov-rank 32 --json ../train_smollm2.json
$train --output-dir runs/dflash --markov-rank 0 --no-enable-confidence-head
python measure.py dspark=runs/markov/draft dflash=runs/dflash/draft --prompts "${PROMPTS:?folder with gsm8k.jsonl, humaneval.jsonl, mt-bench.jsonl}" --json ../embedded_draft.json
