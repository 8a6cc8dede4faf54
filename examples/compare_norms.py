"""Compare two norms over seeds, and read what the differences support.

You learn `fathoms compare`: every arm is trained with the same seeds, data order and budget, and each pair gets a
verdict (better, equivalent, not separated) with an interval, not two bare numbers. The rows are there for analyses of
your own through `fathoms.load_results`. With `norm=layernorm,dyt` the same command shows an arm that never leaves
guessing on these digits: its runs are called stalled, and counted.

    python examples/compare_norms.py          # about a minute on two cores; the page is runs/norms/report.html
"""

import subprocess
import sys

import fathoms

COMMAND = (
    "compare --axis norm=layernorm,rmsnorm --seeds 3 --epochs 8 --depth 4 --experiment norms --device cpu"
)


if __name__ == "__main__":
    print(f"$ fathoms {COMMAND}")
    # Given again, the same command continues where it stopped, and trains nothing that is there already.
    subprocess.run([sys.executable, "-m", "fathoms", *COMMAND.split()], check=True)

    print("\nthe runs:")
    for row in fathoms.load_results("runs/norms"):
        print(f"  {row['arm_name']:<16} seed {row['seed']}  {row['status']}  top1 {row['top1']:.2f}")
