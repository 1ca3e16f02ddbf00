"""Run the commands of docs/sequences.md one after another in an empty folder on a thin target.

Each command is as the page shows it, followed by overrides that make it short: the thin target, other prompts,
few steps, short rows.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.commands.own_target import save_conversations
from tests.support.commands.pages import ROOT, Command, code, commands
from tests.support.runs import run_python

PAGE = ROOT / "docs/sequences.md"
CHAIN = ["data.prepare", "train", "infer.tune", "infer.eval"]
SHORT = {
    "data.prepare": (
        "mixture=one mixture.sources.rows.path=prompts.jsonl mixture.held_out=0.2 mixture.exclude=[] "
        "answers.max_new_tokens=12 target.path=target"
    ).split(),
    "train": (
        "target.path=target optim.epochs=null optim.steps=4 optim.rows_per_step=2 data.row_length=256 "
        "interval.eval=2 held_out.selection=2 held_out.report=2 evaluation.max_new_tokens=8 "
        "evaluation.batch_sizes=[]"
    ).split(),
    "infer.tune": ["max_new_tokens=8", "num_prompts=2", "nodes=[4]", "depth=2", "repeats=1", "batch=[1]"],
    "infer.eval": ["evaluation.max_new_tokens=8", "evaluation.prompts_per_category=1", "evaluation.batch_sizes=[]"],
}


def list_commands(name: str) -> Iterator[Command]:
    """Yield the commands of the sequence's section that run on a single device of any kind."""
    _, section = PAGE.read_text().split(f"\n## {name}\n")
    for command in commands(code(section.partition("\n## ")[0])):
        if command.module in CHAIN and "device=neuron" not in command.words:
            yield command


def run_sequence(name: str, folder: Path, *train_words: str) -> dict[str, Any]:
    """Run a sequence in the folder that holds `target`; return the report of the trained draft."""
    save_conversations(folder / "prompts.jsonl", count=24)
    modules = []
    for command in list_commands(name):
        more = train_words if command.module == "train" else ()
        words = [*command.words, *SHORT[command.module], *more, "device=cpu", "device.compile=false"]
        run_python("-m", command.module, *words, folder=folder)
        modules.append(command.module)
    assert modules == CHAIN
    outputs = folder / "outputs"
    assert {path.name for path in outputs.iterdir()} >= {"prepare", "train", "infer.tune", "infer.eval"}
    assert {path.name for path in outputs.glob("infer.*/*")} == {name}
    assert (outputs / "prepare" / name / "report.json").exists()
    assert (outputs / "train" / name / "checkpoint/config.json").exists()
    return json.loads((outputs / "infer.eval" / name / "report.json").read_text())


def assert_lossless(report: dict[str, Any]) -> None:
    """Check that the report has a mode with a tree and that no mode changed the target's output."""
    (draft,) = report["drafts"]
    modes = report["overall"]["modes"]
    assert f"{draft['name']}/tree" in modes
    assert all(mode["verdict"]["lossless"] != "no" for mode in modes.values())
