"""Run `data.prepare` over small files and read its output."""

import json
from dataclasses import replace
from pathlib import Path

from conf.entry import compose
from data.prepare import main
from data.prepare_config import PrepareConf, SourceConf
from data.sources.prepared_rows import read_prepared_rows


def lines(file: Path, numbers: range, word: str = "question") -> None:
    """Append questions with answers in ShareGPT's format."""
    with file.open("a") as opened:
        for n in numbers:
            turns = [{"from": "human", "value": f"{word} {n}"}, {"from": "gpt", "value": f"{n}!"}]
            opened.write(json.dumps({"id": n, "conversations": turns}) + "\n")


def prepare(
    folder: Path,
    *changes: str,
    run: str = "run",
    rows: int | None = None,
    held_out: float = 0.01,
    **sources: str | SourceConf,
) -> Path:
    """Run the command over files of the folder."""
    base = compose("prepare", PrepareConf, ["mixture=one", "mixture.sources.rows.path=unread", *changes])
    located = {
        name: replace(source, path=str(folder / source.path))
        for name, source in sources.items()
        for source in [SourceConf(path=source) if isinstance(source, str) else source]
    }
    mixture = replace(base.mixture, sources=located, rows=rows, held_out=held_out)
    if mixture.exclude == ["demo"]:
        mixture.exclude = []  # reading the demo's takes seconds
    conf = replace(base, mixture=mixture, run_name=run, output_dir=str(folder / "outputs"))
    main.__wrapped__(conf)
    return folder / "outputs" / run


def asked(folder: Path, split: str = "train") -> list[str]:
    return [(row.messages or [{"content": row.text}])[0]["content"] for row in read_prepared_rows(folder, split)]


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())
