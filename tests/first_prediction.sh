#!/usr/bin/env bash
# The commands of docs/zoo.md with the installed wheel. They use neither the checkout nor the network.
source "$(dirname "$0")/from_the_wheel.sh"
"$python" - <<'EOF'
import csv

import lightning_fcl

assert "/installed/" in lightning_fcl.__file__, lightning_fcl.__file__
one = "0 0 5 13 9 1 0 0 0 0 13 15 10 15 5 0 0 3 15 2 0 11 8 0 0 4 12 0 0 8 8 0 0 5 8 0 0 9 8 0 0 4 11 0 1 12 7 0 0 2 14 5 10 12 0 0 0 0 6 13 10 0 0 0"
with open("digits.csv", "w", newline="") as file:
    csv.writer(file).writerow(one.split())
EOF
"$python" -m lightning_fcl.cli.main zoo ls
"$python" -m lightning_fcl.cli.main zoo predict mlp.digits.flwf2t_replay digits.csv | tee predicted.txt
grep -q "^0	0	" predicted.txt
"$python" -m lightning_fcl.cli.main zoo verify mlp.digits.flwf2t_replay
echo "The first prediction is correct."
