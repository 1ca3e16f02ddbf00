"""Fill, time and memory of packing, beside first fit and beside windows of documents.

    python -m scripts.bench_packing --documents 100000 --length 2048

The documents are as long as conversations of ShareGPT's kind: lognormal, median 800 tokens, one in
ten beyond 3,000; cut at a row's length. Seconds are of the processor, on one core.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from data.packing.documents import Documents
from data.packing.pack import best_fit, pack
from data.sources.tokenized import from_pair

MEDIAN, SIGMA, SHORTEST = 800, 1.05, 8
WINDOW = 2048  # documents that are packed together, in the ways that look at so many
PROMPT = 4  # tokens of a document that are no answer


@dataclass(kw_only=True)
class Way:
    """One way to pack, measured."""

    name: str
    rows: int
    seconds: float


def sharegpt_like(documents: int, length: int) -> np.ndarray:
    """Tokens of each conversation, cut at the length of a row."""
    sizes = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, documents)
    return sizes.astype(int).clip(SHORTEST, length)


def first_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """The row of each, longest first, in the first with room: looks through all rows."""
    used: list[int] = []
    of_document = np.empty(len(sizes), int)
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        row = next((row for row, taken in enumerate(used) if taken + size <= length), len(used))
        if row == len(used):
            used.append(0)
        used[row] += size
        of_document[document] = row
    return of_document


def windowed(fit: Callable, sizes: np.ndarray, length: int) -> int:
    """Rows where documents are packed a window at a time."""
    windows = (sizes[first : first + WINDOW] for first in range(0, len(sizes), WINDOW))
    return sum(int(fit(window, length).max()) + 1 for window in windows)


def ways(sizes: np.ndarray, length: int) -> Iterator[Way]:
    """Each way's rows and seconds. First fit looks through all rows: it only gets windows."""
    for name, rows in {
        f"first fit, {WINDOW} at a time": lambda: windowed(first_fit, sizes, length),
        f"best fit, {WINDOW} at a time": lambda: windowed(best_fit, sizes, length),
        "best fit, all": lambda: int(best_fit(sizes, length).max()) + 1,
    }.items():
        began = time.process_time()
        found = rows()
        yield Way(name=name, rows=found, seconds=time.process_time() - began)


def peak_bytes() -> int:
    """Of this process so far, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Packing, measured")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    sizes = sharegpt_like(args.documents, args.length)
    tokens, before = int(sizes.sum()), peak_bytes()
    made = (from_pair([7] * PROMPT, [9] * (size - PROMPT)) for size in sizes.tolist())
    documents = Documents.of(made)
    read, began = peak_bytes(), time.process_time()
    _, report = pack(documents, args.length)
    print(report)
    print(f"read: {(read - before) / tokens:.2f} bytes a token at most, of {tokens:,} tokens")
    print(
        f"pack: {time.process_time() - began:.2f} s, "
        f"{(peak_bytes() - read) / 1e6:.0f} MB more at most"
    )
    for way in ways(sizes, args.length):
        fill = tokens / (way.rows * args.length)
        print(f"{way.name:<26} {fill:7.2%} filled  {way.rows:>8,} rows  {way.seconds:7.2f} s")


if __name__ == "__main__":
    main()
