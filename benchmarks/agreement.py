"""The losses of one training under several backends, beside those of another seed: mean over runs of steps, to a CSV file.

for backend in reference triton cupy; do
  hot train fashion-vit --set epochs=null --set steps=200 --set log_every=1 --set backend=$backend --compare hot \
    --set 'seeds=[0,1]' --output runs/$backend
done
python benchmarks/agreement.py runs/reference runs/triton runs/cupy --output benchmarks/results/agreement_h200.csv
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from statistics import mean

from hot.train.checkpoint import read_metrics

WIDTH = 20
"""Steps whose losses are one number."""


def losses(run: Path) -> list[float]:
    """The training loss of every WIDTH steps of a run that logged each."""
    found = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    return [mean(found[at : at + WIDTH]) for at in range(0, len(found), WIDTH)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outputs", type=Path, nargs="+", help="folders of `hot train`, called after their backend")
    parser.add_argument("--output", type=Path, required=True, help="the CSV file, written anew")
    args = parser.parse_args()
    rows = []
    for output in args.outputs:
        summary = json.loads((output / "summary.json").read_text())
        for run in summary["runs"]:
            for number, loss in enumerate(losses(output / f"{run['policy']}-seed{run['seed']}")):
                row = {"device": run["device"], "torch": run["torch"], "backend": output.name, "seed": run["seed"]}
                rows.append({**row, "step": (number + 1) * WIDTH, "loss": round(loss, 4)})
    with args.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
