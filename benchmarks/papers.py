"""Figures that two papers print, beside the price that Merak gives the same jobs on their clusters.

    python benchmarks/papers.py [--figure table3 6 9a 14 notes …] [--rows 1] [--check PAGE]

Nothing runs, and no device is needed: models are ordinary transformers models without weights, and
speeds are those of the library's data sheets and of the cluster files in `data`. The papers are
Merak (IEEE TPDS; table III, figures 5 to 8 and 9a to 9c) and Chimera (SC21; figures 1 and 9 to 19);
"notes" has formulas of four others. "split" alone is measured on this machine, and not checked. Of
figures that are pictures, the numbers that their text prints are in `data`; so are the layouts, as
far as they are printed. What is not printed (layers of Merak's models, microbatches) is said in a
comment.

Merak's paper names no precision. All of its jobs are priced in float32, whose products an RTX 3090
computes as TF32: see docs/benchmarks.md for why. Attention is in parts, as models had it then.
"""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path

from tools import chimera_figures, formula_figures, merak_figures, report

TABLES = merak_figures.FIGURES | chimera_figures.FIGURES | formula_figures.FIGURES


def main() -> None:
    """Print the tables."""
    parser = report.parser(__doc__)
    parser.add_argument("--figure", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--rows", type=int, help="of each figure, the first so many alone")
    parser.add_argument("--check", type=Path, help="page that must have these rows")
    args = parser.parse_args()
    if args.check:
        args.figure = [name for name in args.figure if name != "split"]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = {TABLES[name][0]: list(islice(TABLES[name][1](), args.rows)) for name in args.figure}
    report.show(found, args.json)
    if args.check:
        report.check(found, args.check)


if __name__ == "__main__":
    main()
