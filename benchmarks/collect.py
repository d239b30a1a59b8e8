"""Experiments to a CSV of results: the summary.json that `hot train` writes, one row a run.

python benchmarks/collect.py runs/quickstart/summary.json --output benchmarks/results/quickstart.csv
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
from pathlib import Path

COLUMNS = [
    "date", "device", "threads", "torch", "experiment", "policy", "seed", "steps", "accuracy", "loss",
    "forward_ms", "backward_ms", "step_ms", "saved_bytes", "saved_bytes_in_layers", "peak_bytes",
]  # fmt: skip


def rows(summary: Path, side_by_side: bool = False) -> list[dict[str, object]]:
    """The rows of one summary; its date is that of the file, its peak the allocator's (CUDA) or the process's growth (CPU).
    side_by_side: runs shared the device, so their times mean nothing and are left empty."""
    content = json.loads(summary.read_text())
    date = datetime.date.fromtimestamp(summary.stat().st_mtime).isoformat()
    found = []
    for run in content["runs"]:
        parts = "forward", "backward", "total"
        times = ["" if side_by_side else round(run["step_ms"][part], 2) for part in parts]
        saved, peak = run["saved_bytes"], run["peak_bytes"]
        values = [
            date, run["device"], run["threads"], run["torch"], content["experiment"]["name"], run["policy"], run["seed"],
            run["steps"], run["accuracy"], round(run["loss"], 4), *times,
            saved["total"], saved["in_layers"], peak.get("allocated", peak.get("rss_growth")),
        ]  # fmt: skip
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summaries", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True, help="the CSV file, written anew")
    parser.add_argument("--side-by-side", action="store_true", help="the runs shared a device: keep no times")
    args = parser.parse_args()
    with args.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for summary in args.summaries for row in rows(summary, args.side_by_side))


if __name__ == "__main__":
    main()
