# How the embedded draft was made: texts of the target, a draft, and the same draft without Markov head to compare.
# On one H200 the three `synthesize` ran side by side and were stopped after 170 s: what follows used the 4, 4 and 2
# batches that each had finished (40,953 conversations, 15.4 M tokens). Training took 106 ms a step.
set -e
cd "$(dirname "$0")"
python prompts.py prompts.jsonl --count 110000
split -n l/2 --additional-suffix=.jsonl prompts.jsonl prompts_
common="--temperatures 0 --temperatures 0.7 --temperatures 0 --temperatures 1.0 --max-length 640 --max-answer-tokens 384 --batch-size 512"
hf-dspark synthesize --output aa.jsonl --prompts prompts_aa.jsonl --seed 1 $common
hf-dspark synthesize --output ab.jsonl --prompts prompts_ab.jsonl --seed 3 $common
hf-dspark synthesize --output own.jsonl --num-own 60000 --turns 3 --seed 2 --user-temperature 0.9 $common
train="hf-dspark train --data aa.jsonl --data ab.jsonl --data own.jsonl --max-length 640 --num-hidden-layers 3 --batch-size 48 --num-anchors 64 --max-steps 3200 --num-validation-texts 192 --validate-every 2500 --save-every 1500 --keep-checkpoints 1"
$train --output-dir runs/markov --markov-rank 32 --json ../train_smollm2.json
$train --output-dir runs/dflash --markov-rank 0 --no-enable-confidence-head
python measure.py dspark=runs/markov/draft dflash=runs/dflash/draft --prompts "${PROMPTS:?folder with gsm8k.jsonl, humaneval.jsonl, mt-bench.jsonl}" --json ../embedded_draft.json
