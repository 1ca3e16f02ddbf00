"""Help, the composed configuration and mistakes are answered at once, as they import no PyTorch."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "train.__main__ train.plan train.warmup train.device.__main__ infer.eval infer.tune infer.generate infer.plan "
    "infer.warmup infer.tree_file data.prepare data.capture data.show"
).split()
CHECKPOINT_COMMANDS = ("infer.eval", "infer.tune", "infer.warmup")
SLOW = {"accelerate", "datasets", "matplotlib", "openai", "peft", "scipy", "torch", "transformers"}
# Runs each line in turn: as modules stay imported, the first line that imports one is named.
RUN_ALL = """
import contextlib, importlib, io, json, sys

answers = []
for module, *words in json.loads(sys.argv[1]):
    output = io.StringIO()
    command = importlib.import_module(module)
    sys.argv = [module, *words]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = command.main(words) if module == "infer.compare" else command.main()
        except SystemExit as end:
            code = end.code
    imported = sorted({name.partition(".")[0] for name in sys.modules})
    answers.append([code or 0, output.getvalue(), imported])
print(json.dumps(answers))
"""


def run_all(lines: list[list[str]], folder: Path) -> list[tuple[int, str, set[str]]]:
    """Return the exit code, the output and the imported packages after each command line."""
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(lines)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [(code, output, set(packages)) for code, output, packages in json.loads(process.stdout)]


def test_help_configurations_and_mistakes_import_no_pytorch(tmp_path):
    missing = str(tmp_path / "none")
    source = f"mixture.sources.rows.path={missing}.jsonl"
    cases = [(0, "== ", command, "--help") for command in COMMANDS]
    cases += [(0, "output_dir: ", command, "--cfg", "job") for command in COMMANDS]
    cases += [(2, "error: rnu_name: no such key;", command, "rnu_name=x") for command in COMMANDS]
    cases += [
        (2, "error: checkpoint: must be a folder with config.json,", c, f"checkpoint={missing}")
        for c in CHECKPOINT_COMMANDS
    ]
    cases += [
        (
            2,
            "error: checkpoint: must be a folder with config.json,",
            "infer.generate",
            "prompt=x",
            f"checkpoint={missing}",
        ),
        (2, "error: prompt: needs a text, or prompts=FILE", "infer.generate"),
        (2, "error: target: no such option, got 'none';", "train.__main__", "target=none"),
        (2, "error: mixture.sources.rows.path: must exist,", "data.prepare", "mixture=one", source),
        (2, "error: optim.lr: must be positive, got -1", "train.__main__", "optim.lr=-1"),
        (2, "error: tree.depth: must be at most", "train.__main__", "tree.depth=99", "tree=chain"),
        (2, "error: tree.file: must be a readable JSON", "infer.tree_file", f"tree.file={missing}"),
        (2, "error: command line: must be two reports, or several", "infer.compare"),
        (2, "error: report: must be a readable report.json,", "infer.compare", missing, missing),
    ]
    cases += [
        (2, "error: data.path: must be a JSONL file,", c, "data=jsonl", f"data.path={missing}.jsonl")
        for c in ("train.__main__", "data.capture", "data.show")
    ]
    cases += [
        (2, "error: target.name: must be a reachable model, got", command, "draft=qwen3-8b-eagle3")
        for command in ("train.__main__", "data.capture")
    ]
    cases += [
        (2, "error: draft.name: must be a reachable", "train.__main__", "draft=qwen3-1.7b", "target=demo"),
        (2, "error: target.path: must be a reachable", "train.__main__", f"target.path={missing}"),
    ]
    answers = run_all([list(words) for _, _, *words in cases], tmp_path)
    for (code, text, *words), (actual_code, output, packages) in zip(cases, answers, strict=True):
        assert (actual_code, text in output) == (code, True), (words, output)
        assert not packages & SLOW, words
