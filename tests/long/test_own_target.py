"""The documented commands for a user's own target run in their order in an empty folder.

Names of models and files are the user's; the rest is as documented, but short: few steps, short
rows, few prompts. Commands for the demo's target, the hub or a server are left out.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.commands.own_target import save_conversations, save_target
from tests.support.commands.pages import ROOT, Command, code, commands

pytestmark = pytest.mark.slow

ELSEWHERE = {"-m", "mixture=chat"}  # a sweep of the demo; sources on the hub, answered by a server
SHORT = {
    "train": (
        "optim.epochs=null optim.steps=4 optim.rows_per_step=2 data.row_length=256 held_out.selection=2 "
        "evaluation.max_new_tokens=8 evaluation.prompts_per_category=1 evaluation.batch_sizes=[] log=console"
    ).split(),
    "data.prepare": ["answers.max_new_tokens=32", "mixture.held_out=0.2"],
    "data.capture": ["data.row_length=256"],
    "infer.eval": ["evaluation.max_new_tokens=8", "evaluation.prompts_per_category=1", "evaluation.batch_sizes=[]"],
    "infer.tune": ["max_new_tokens=8", "num_prompts=2", "nodes=[4]", "depth=3", "repeats=1"],
}
MODELS = {"train", "data.prepare", "data.show", "data.capture"}  # others know it from a checkpoint
WITH_DATA = ("data.path=", "experiment=")  # training on rows of its own
# Drafts side by side are evaluated on the same prompts, so these learn from one file.
SAME_DATA = ("qwen3-8b-eagle3", "qwen3-1.7b", "second-seed")
PAGES = {  # page: its section with commands, and the runs that these train
    "README.md": (r"## Use it on your own target\n(.*?)\n`target.path=DIR` takes", {"qwen3-8b-eagle3"}),
    "docs/index.md": (r"## Commands\n(.*?)\nOn Trainium", {*SAME_DATA, "answers", "chat", "stored"}),
}
A, B, C = (f"outputs/train/{name}/checkpoint" for name in SAME_DATA)
REPLACEMENTS = {
    "outputs/train/demo/checkpoint": A,
    "=A": f"={A}",
    "[A,B,C]": f"[{A},{B},{C}]",
    "[A,B]": f"[{A},{B}]",
    "before/": f"outputs/train/{SAME_DATA[0]}/",
    "after/": f"outputs/train/{SAME_DATA[2]}/",
    "/models/my-qwen3-8b": "target",
}


def build_arguments(command: Command) -> list[str]:
    """Return the arguments of a command with the user's names for models and files."""
    arguments = [replace_names(word) for word in command.words]
    if command.module in MODELS and "target.path=target" not in arguments:
        arguments.append("target.path=target")
    if "draft=qwen3-1.7b" in arguments:
        arguments.append("draft.path=draft")
    if command.module == "train" and not any(word.startswith(WITH_DATA) for word in arguments):
        arguments.append("data.path=answers.jsonl")
    return (
        arguments
        + SHORT.get(command.module, [])
        + ["device.compile=false"] * (command.module not in ("data.show", "infer.compare"))
    )


def replace_names(word: str) -> str:
    for theirs, ours in REPLACEMENTS.items():
        if theirs in word and not (theirs == "=A" and not word.endswith("=A")):
            return word.replace(theirs, ours)
    return word


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_for_a_users_own_target_run_to_their_end(tmp_path, page):
    pattern, runs = PAGES[page]
    save_target(tmp_path / "target")
    save_target(tmp_path / "draft", num_hidden_layers=2)
    for name in ("answers.jsonl", "prompts.jsonl"):
        save_conversations(tmp_path / name, count=48)
    question = {"question_id": 1, "category": "writing", "turns": ["Tell me about tea.", "More."]}
    (tmp_path / "question.jsonl").write_text(json.dumps(question) + "\n")
    (section,) = re.findall(pattern, (ROOT / page).read_text(), re.DOTALL)
    selected = [command for command in commands(code(section)) if not ELSEWHERE.intersection(command.words)]
    # Drafts that are evaluated and compared are trained further down on the page.
    selected.sort(key=lambda command: command.module.startswith("infer"))
    for command in selected:
        line = [sys.executable, "-m", command.module, *build_arguments(command)]
        process = subprocess.run(
            line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, check=False
        )
        allowed = {0, 1} if command.module == "infer.compare" else {0}  # 1: a regression
        assert process.returncode in allowed, f"{line[2:]}\n{process.stdout[-2000:]}\n{process.stderr[-2000:]}"
        if (
            command.module == "data.prepare" and page != "README.md"
        ):  # in place of the data that needs the hub and a server
            shutil.copytree(tmp_path / "outputs/prepare/mine", tmp_path / "outputs/prepare/chat")
    trained = {path.parent.name for path in tmp_path.glob("outputs/train/*/report.json")}
    assert trained >= runs
