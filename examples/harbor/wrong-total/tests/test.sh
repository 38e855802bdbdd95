#!/usr/bin/env bash
# 1 for right sums; half of it for a program that runs at all.
reward=0
if answer=$(python3 total.py "$TOTAL_OF"); then
  reward=0.5
  [[ $answer == $((TOTAL_OF * (TOTAL_OF + 1) / 2)) && $(python3 total.py 100) == 5050 ]] && reward=1
fi
echo "$reward" >/logs/verifier/reward.txt
