"""A few requests of each recording, small enough for the repository.

``python -m benchmarks.recording.excerpt SOURCE TARGET [--drafts N]`` copies the first requests of every .npz
in SOURCE, about N drafts a recording, equally many requests of each data set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from .rows import DraftRows


def excerpt(rows: DraftRows, num_drafts: int) -> DraftRows:
    """The first requests of each data set, so many that they have at least ``num_drafts`` drafts."""
    numbers, first, counts = np.unique(rows.request, return_index=True, return_counts=True)
    data_set = rows.data_set[first]
    rank = np.zeros(numbers.size, np.int64)
    for one in np.unique(data_set):
        rank[data_set == one] = np.arange((data_set == one).sum())
    drafts = np.cumsum(np.bincount(rank, counts))
    last = int(np.searchsorted(drafts, num_drafts))
    return rows.select(np.isin(rows.request, numbers[rank <= last]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafts", type=int, default=6000, help="drafts of a recording, at least")
    options = parser.parse_args()
    options.target.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.source.glob("*.npz")):
        rows = excerpt(DraftRows.load(path), options.drafts)
        rows.save(options.target / path.name)
        print(
            f"{path.name}: {len(rows)} drafts, {(options.target / path.name).stat().st_size} bytes"
        )


if __name__ == "__main__":
    main()
