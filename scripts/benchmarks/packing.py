"""Compare fill, time and memory of packing with first fit and with windowed packing.

    python -m scripts.benchmarks.packing --documents 100000 --length 2048

Document lengths are distributed like ShareGPT's conversations: lognormal, median 800 tokens, one in
ten above 3,000; documents are cut at the row length. Seconds are CPU seconds on one core.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from data.packing.documents import Documents
from data.packing.pack import best_fit, pack_documents
from data.sources.rows import document_from_pair

MEDIAN, SIGMA, SHORTEST = 800, 1.05, 8
WINDOW = 2048  # documents that are packed together in windowed packing
PROMPT = 4  # prompt tokens of each document


@dataclass(kw_only=True)
class Way:
    """The measurements of one packing method."""

    name: str
    rows: int
    seconds: float


def sharegpt_like(documents: int, length: int) -> np.ndarray:
    """Draw the number of tokens of each conversation, cut at the row length."""
    sizes = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, documents)
    return sizes.astype(int).clip(SHORTEST, length)


def first_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Assign each document, longest first, to the first row with room; the search is linear."""
    used: list[int] = []
    row_of_document = np.empty(len(sizes), int)
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        row = next((row for row, taken in enumerate(used) if taken + size <= length), len(used))
        if row == len(used):
            used.append(0)
        used[row] += size
        row_of_document[document] = row
    return row_of_document


def windowed(fit: Callable, sizes: np.ndarray, length: int) -> int:
    """Count the rows when documents are packed one window at a time."""
    windows = (sizes[first : first + WINDOW] for first in range(0, len(sizes), WINDOW))
    return sum(int(fit(window, length).max()) + 1 for window in windows)


def ways(sizes: np.ndarray, length: int) -> Iterator[Way]:
    """Measure each method. First fit searches all rows, so it runs on windows only."""
    for name, count_rows in {
        f"first fit, {WINDOW} at a time": lambda: windowed(first_fit, sizes, length),
        f"best fit, {WINDOW} at a time": lambda: windowed(best_fit, sizes, length),
        "best fit, all": lambda: int(best_fit(sizes, length).max()) + 1,
    }.items():
        began = time.process_time()
        rows = count_rows()
        yield Way(name=name, rows=rows, seconds=time.process_time() - began)


def peak_bytes() -> int:
    """Return the peak memory of this process so far (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Packing, measured")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    sizes = sharegpt_like(args.documents, args.length)
    tokens, start_peak = int(sizes.sum()), peak_bytes()
    generated = (document_from_pair([7] * PROMPT, [9] * (size - PROMPT)) for size in sizes.tolist())
    documents = Documents.from_documents(generated)
    read_peak, began = peak_bytes(), time.process_time()
    _, report = pack_documents(documents, args.length)
    print(report)
    print(f"read: {(read_peak - start_peak) / tokens:.2f} bytes per token at most, of {tokens:,} tokens")
    print(f"pack: {time.process_time() - began:.2f} s, {(peak_bytes() - read_peak) / 1e6:.0f} MB more at most")
    for way in ways(sizes, args.length):
        fill = tokens / (way.rows * args.length)
        print(f"{way.name:<26} {fill:7.2%} filled  {way.rows:>8,} rows  {way.seconds:7.2f} s")


if __name__ == "__main__":
    main()
