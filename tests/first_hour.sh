#!/usr/bin/env bash
# The first steps of a new user with the installed wheel. They use neither the checkout nor the network.
source "$(dirname "$0")/from_the_wheel.sh"
fcl() { "$python" -m lightning_fcl "$@"; }
quiet=(--trainer.enable_progress_bar false --trainer.accelerator cpu)
expect() { # TEXT WORDS...: check that `lightning-fcl WORDS` succeeds and prints TEXT
  local text="$1"
  shift
  fcl "$@" >said.txt
  grep -q -- "$text" said.txt || { echo "Expected \"$text\" in the output of $*, but got:" && cat said.txt && exit 1; }
}
where="$("$python" -c 'import lightning_fcl; print(lightning_fcl.__file__)')"
case "$where" in "$here"/installed/*) ;; *) echo "Expected the package of the wheel, but got $where" && exit 1 ;; esac

echo "== list, copy and check recipes"
fcl --version
expect "recipes" ls
expect "Replay" ls methods replay
fcl cp quickstart mine.yaml
expect "The recipe is valid." validate mine.yaml

echo "== train and test a recipe by name"
expect "lightning-fcl test runs/quickstart" fit quickstart --trainer.max_epochs 2 "${quiet[@]}"
expect "test/accuracy" test runs/quickstart "${quiet[@]}"

echo "== train on a CSV file with a custom model and method"
cat >my_data.py <<'PY'
import csv

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Table(L.LightningDataModule):
    """A CSV file with one sample per line: the features, then the class."""

    def __init__(self, file: str = "mine.csv"):
        super().__init__()
        with open(file, newline="") as lines:
            rows = torch.tensor([[float(cell) for cell in row] for row in csv.reader(lines)])
        self.x, self.y = rows[:, :-1], rows[:, -1].long()

    def _part(self, first):
        return DataLoader(TensorDataset(self.x[first::4], self.y[first::4]), batch_size=16)

    def train_dataloader(self):
        return DataLoader(torch.utils.data.ConcatDataset([self._part(first).dataset for first in (0, 1, 2)]))

    def test_dataloader(self):
        return self._part(3)
PY
cat >my_model.py <<'PY'
from torch import nn

from lightning_fcl import Classifier


class MyNet(Classifier):
    def __init__(self, width: int = 8):
        super().__init__(nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4)), 4)
PY
cat >my_method.py <<'PY'
from dataclasses import dataclass

from lightning_fcl.callbacks import Method


@dataclass(eq=False)
class StayNear(Method):
    mu: float = 0.001

    def penalty(self, client, step):
        return self.mu * sum((value - step.received_state[name]).abs().sum() for name, value in step.params.items())
PY
"$python" - <<'PY'
import csv
import random

random.seed(0)
with open("mine.csv", "w", newline="") as file:
    for i in range(480):
        label = i // 4 % 4
        csv.writer(file).writerow([round(random.gauss(3 * (feature == label), 1), 3) for feature in range(6)] + [label])
PY
cat >own.yaml <<'YAML'
trainer:
  strategy: {class_path: FederatedStrategy, init_args: {local_epochs: 10, max_vectorized_clients: 1}}
  callbacks:
    - class_path: my_method.StayNear
      init_args: {mu: 0.0001}
    - class_path: Replay
      init_args: {memory_size: 20}
model: {class_path: my_model.MyNet, init_args: {width: 16}}
data:
  data: {class_path: my_data.Table}
  scenario: {class_path: ClassIncremental, init_args: {num_experiences: 2, rounds_per_experience: 4}}
  partition: {class_path: IID, init_args: {num_clients: 3}}
out: runs/own
YAML
expect "StayNear, Replay" validate own.yaml
expect "lightning-fcl test runs/own" fit own.yaml "${quiet[@]}"

echo "== write and train a new method"
expect "pytest test_fed_anchor.py" new method FedAnchor
expect "lightning-fcl test runs/fed_anchor" fit fed_anchor.yaml --trainer.max_epochs 2 "${quiet[@]}"
expect "statements hold" conformance fed_anchor.py

echo "== kill a run after a round, and resume it"
"$python" -m lightning_fcl fit own.yaml "${quiet[@]}" --out runs/killed >killed.txt 2>&1 &
run=$!
until compgen -G "runs/killed/checkpoints/*.ckpt" >/dev/null; do
  kill -0 "$run" 2>/dev/null || { echo "Expected a running process, but it has ended:" && cat killed.txt && exit 1; }
  sleep 0.1
done
kill -9 "$run" && wait "$run" 2>/dev/null || true
expect "lightning-fcl test runs/killed" fit runs/killed "${quiet[@]}"
"$python" - <<'PY'
import json

one, two = (json.load(open(f"runs/{name}/results.json")) for name in ("own", "killed"))
assert one["finished"] and two["finished"]
assert one["metrics"] == two["metrics"], "the resumed run has other metrics than the uninterrupted run"
assert one["metrics"]["final_accuracy/server"] > 0.6, one["metrics"]
PY
expect "test/accuracy" test runs/killed "${quiet[@]}"

echo "== write reports and compare runs"
grep -q "MyNet" runs/own/report.html && grep -q "StayNear, Replay" runs/own/report.html
expect "Wrote both.html" report runs/own runs/killed --out both.html
grep -q "runs/killed" both.html
test "$(wc -c <both.html)" -lt 2000000

echo "All first steps succeeded."
