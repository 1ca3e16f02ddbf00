"""Measure how long training's data takes to be tokenized, at the first start and at later ones.

    bash scripts/get_tokenizers.sh                    puts Qwen3's tokenizer in .cache
    python -m scripts.benchmarks.tokens --rows 2000   prints the table
    python -m scripts.benchmarks.tokens --write       200,000 rows, to docs/prepare.md

The conversations are made up: two turns of English, code and other languages. Ranks are processes
that open the same data at the same time, as those of a run do.
"""

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from conf.entry import compose
from data import document_cache
from data.config import DataConf, DataSource
from infer.report.number_format import Table
from models.device.opening import open_device
from scripts.benchmarks.tables import machine, publish
from train.config.run import TrainConf

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "prepare.md"
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"
CASES = ((1, 1), (1, 2), (4, 2))  # ranks, and processes that tokenize
# Processes that tokenize import the module that is run, which must be light as `train` is.
RANK = "import sys; from scripts.benchmarks.tokens import open_data; open_data(*sys.argv[1:])"
POLL_S = 0.5  # between looks at the memory of all processes
ENGLISH = (
    "the of and to in is that for it was on as with they be at have this from or had by not but some what there we can "
    "out other were all your when up use how said an each which do their time if will way about many then them would "
    "write like so these her long make thing see him two has look more day could go come did number sound most people "
    "over know water than call first may down side been now find any new work part take get place made live where "
    "after back little only round man year came show every good me give our under question answer"
)
CODE = (
    "def total(values):\n    return sum(value for value in values if value)\n",
    "for (int i = 0; i < n; ++i) {\n    a[i] += b[i];\n}\n",
    "SELECT name, COUNT(*) FROM rows GROUP BY name;\n",
    "```python\nprint({key: value for key, value in items})\n```\n",
)
OTHER_LANGUAGES = (
    "Der schnelle braune Fuchs springt \u00fcber den faulen Hund. ",
    "El perro perezoso duerme bajo el \u00e1rbol. ",
    "\u6211\u4eec\u4eca\u5929\u53bb\u516c\u56ed\u6563\u6b65\uff0c\u5929\u6c14\u5f88\u597d\u3002",
    "\u0411\u044b\u0441\u0442\u0440\u0430\u044f \u043b\u0438\u0441\u0430. ",
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u0639\u0644\u064a\u0643\u0645 ",
)


def make_text(draw: random.Random, words: int) -> str:
    """Return about so many words: 70 % English, 15 % code, the rest in other languages."""
    parts, english = [], ENGLISH.split()
    for _ in range(0, words, 15):
        sentence = " ".join(draw.choices(english, k=20)).capitalize() + ". "
        kinds = (sentence, draw.choice(CODE), draw.choice(OTHER_LANGUAGES))
        parts += draw.choices(kinds, weights=(70, 15, 15))
    return "".join(parts)


def write_conversations(file: Path, count: int) -> None:
    """Write conversations of two turns; each depends on its number alone."""
    with file.open("w") as stream:
        for number in range(count):
            draw = random.Random(number)
            messages = [
                {"role": role, "content": make_text(draw, draw.randint(*words))}
                for role, words in (("user", (10, 60)), ("assistant", (40, 240))) * 2
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")


def open_data(file: str, output_dir: str, processes: str) -> None:
    """Open the data as a rank does; print what it took, as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    read_documents, times_tokenized = document_cache.read_documents, 0

    def read_and_count(*arguments: Any) -> Any:
        nonlocal times_tokenized
        times_tokenized += 1
        return read_documents(*arguments)

    document_cache.read_documents = read_and_count
    conf = DataConf(source=DataSource.jsonl, path=file, processes=int(processes))
    began, busy = time.perf_counter(), sum(os.times()[:4])
    documents = document_cache.read_cached_documents(conf, tokenizer, len(tokenizer), output_dir)
    report = {
        "wall_s": time.perf_counter() - began,
        "busy_s": sum(os.times()[:4]) - busy,
        "tokenized": times_tokenized,
        "tokens": len(documents.ids),
    }
    print(json.dumps(report))


def start_ranks(count: int, *arguments: str) -> tuple[list[dict[str, Any]], list[int], list[int]]:
    """Start ranks and wait; return their reports, their peak bytes, and those of each process that they started."""
    command = [sys.executable, "-c", RANK, *arguments]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    peaks: Counter[int] = Counter()
    while any(rank.poll() is None for rank in ranks):
        for process in psutil.Process().children(recursive=True):
            try:
                peaks[process.pid] = max(peaks[process.pid], process.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_S)
    reports = [json.loads(rank.stdout.read().splitlines()[-1]) for rank in ranks if rank.stdout]
    rank_peaks = [peaks.pop(rank.pid, 0) for rank in ranks]
    return reports, rank_peaks, [*peaks.values()]


def measure(file: Path, folder: Path, ranks: int, processes: int) -> list[dict[str, str]]:
    """Return two rows of the table: the first start and the second."""
    rows = []
    for name in ("first", "second"):
        reports, rank_peaks, helper_peaks = start_ranks(ranks, str(file), str(folder), str(processes))
        wall_s = max(report["wall_s"] for report in reports)
        busy_s = sum(report["busy_s"] for report in reports)
        rows.append(
            {
                "ranks": f"{ranks}",
                "processes": f"{processes}",
                "start": name,
                "seconds": f"{wall_s:,.1f}",
                "busy seconds": f"{busy_s:,.1f}",
                "tokenized by": f"{sum(report['tokenized'] for report in reports)}",
                "largest rank": f"{max(rank_peaks) / 1e6:,.0f}",
                "smallest rank": f"{min(rank_peaks) / 1e6:,.0f}" if ranks > 1 else "",
                "tokenizing process": f"{max(helper_peaks) / 1e6:,.0f}" if helper_peaks else "",
            }
        )
        print(*rows[-1].values(), sep="\t", file=sys.stderr, flush=True)
    return rows


def build_table(count: int) -> Table:
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "rows.jsonl"
        write_conversations(file, count)
        megabytes = file.stat().st_size / 1e6
        rows = [row for case in CASES for row in measure(file, Path(temporary) / "-".join(map(str, case)), *case)]
    return Table.from_records(
        rows,
        title="Tokenization",
        note=f"{count:,} made-up conversations of two turns ({megabytes:,.0f} MB), Qwen3's "
        "tokenizer and chat template. Seconds until the last rank has its documents, and busy "
        "seconds of all processes together, without imports. Peaks are resident memory, in MB: of "
        "the largest rank, the smallest rank and the largest of the processes that tokenize.",
        label_columns=3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="number of conversations")
    parser.add_argument("--write", action="store_true", help="update docs/prepare.md")
    args = parser.parse_args()
    results = build_table(args.rows)
    device = open_device(compose("train", TrainConf, ["device=cpu"]).device)
    publish("tokens", results, setting=machine(device), page=PAGE, should_write=args.write)


if __name__ == "__main__":
    main()
