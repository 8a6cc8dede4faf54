"""Planned looks and dropped arms on the runs of a finished comparison: runs that they would have used, and verdicts.

    python benchmarks/compare_replay.py results/compare/stem_patch4 --looks 3,5 --keep-arms 2@3

The runs of a fixed design hold those of every design with fewer: each is judged as if no further run had been made.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fathoms.comparing.plan import parse_keep, parse_seeds
from fathoms.comparing.results import arms_of, judged, rules_of
from fathoms.comparing.verdicts import wanted_seeds


def verdicts(rows: list[dict[str, Any]], plan: dict[str, Any], root: Path, tuned: Any) -> dict[str, str]:
    """What is said of each pair."""
    return {f"{row['a']} - {row['b']}": row["verdict"] for row in judged(rows, plan, root, tuned)["verdicts"]}


def main() -> None:
    """Print both designs as one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a comparison without looks, all of whose runs have ended")
    parser.add_argument("--looks", required=True, help="numbers of seeds, such as 3,5,10")
    parser.add_argument("--keep-arms", help="ARMS@SEEDS")
    parser.add_argument("--baseline", help="an arm; without it, that of the comparison")
    args = parser.parse_args()
    read = {name: args.folder / f"{name}.json" for name in ("plan", "results", "tuning")}
    kept = {name: json.loads(path.read_text()) for name, path in read.items() if path.is_file()}
    rows, tuned = kept["results"]["cells"], kept.get("tuning", {}).get("arms", [])
    plan = {**kept["plan"], "baseline": args.baseline or kept["plan"]["baseline"]}
    fixed = verdicts(rows, {**plan, "looks": [], "keep_arms": None}, args.folder, tuned)
    looks = parse_seeds(args.looks)
    plan |= {"looks": list(looks), "keep_arms": parse_keep(args.keep_arms, looks)}
    arms, rules = arms_of(rows, plan, args.folder, tuned), rules_of(rows, plan, tuned)
    seeds = wanted_seeds(arms, rules, looks[-1])
    run = [row for row in rows if row["seed"] < seeds[row["name"]]]
    found = verdicts(run, plan, args.folder, tuned)
    told = {"runs": len(run), "of": len(rows), "seeds": seeds, "verdicts": found, "fixed": fixed}
    print(json.dumps(told | {"same": sum(found[pair] == fixed[pair] for pair in fixed)}, indent=1))


if __name__ == "__main__":
    main()
