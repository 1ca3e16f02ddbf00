"""A target that is split over processes decodes what a single process does, compiled, and is judged by one command."""

import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from infer.eval import main
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.targets.config import TargetConf
from models.targets.loading import load_target
from tests.support.decoding.split_run import (
    COMPILED,
    PROMPTS,
    capture,
    count_decoding_values,
    decode_every_way,
    open_cpu,
    tune,
)
from tests.support.reports.tuning import costs
from tests.support.runs import ROOT, launch_script, run_python
from tests.support.runs.killing import TIMEOUT_S, wait_for_moment
from tests.support.runs.parallel_run import DRAFTS, save_target

LARGEST_FILE = 120_000  # bytes: the journal grows beyond it, no other file does
ANSWERED = (
    "mixture=one mixture.held_out=0 answers=target answers.temperature=1 answers.max_new_tokens=6 answers.batch=3 "
    "device=cpu device.precision=float32"
)
JUDGED = "evaluation=quick evaluation.max_new_tokens=8 tree=chain tree.depth=2 device=cpu device.compile=false"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a target, a draft of every method, prompts, and what two processes saw."""
    folder = tmp_path_factory.mktemp("split")
    save_target(folder / "target")
    target = load_target(TargetConf(path=str(folder / "target")), open_cpu(compiles=False))
    for name, conf in DRAFTS.items():
        build_draft(conf, target, loss=LossConf(), seed=0).save(folder / name, target)
    alone = {
        "answers": decode_every_way(target, folder),
        "fingerprint": target.fingerprint,
        "held": count_decoding_values(target),
        "tuned_by_table": tune(target, folder, costs(node_s=0.01)),
    }
    (folder / "alone.json").write_text(json.dumps(alone))
    rows = [{"id": i, "category": "ab"[i], "text": " ".join(map(str, ids))} for i, ids in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    documents = [{"ids": [*range(i, i + 20)], "answer": [False] * 5 + [True] * 15} for i in range(1, 11)]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    capture(folder, tensor=1)
    launch_script("../decoding/split_run.py", folder, processes=2)
    return folder


def read_alone(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "alone.json").read_text())


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_every_method_writes_the_same_tokens_by_as_many_rounds(folder):
    alone = read_alone(folder)
    for rank in read_ranks(folder):
        assert rank["answers"] == alone["answers"]
        assert rank["fingerprint"] == alone["fingerprint"]


def test_a_process_holds_half_of_target_and_cache_and_passes_with_gradients_compute_the_same(folder):
    alone = read_alone(folder)["held"]
    for rank in read_ranks(folder):
        assert all(rank["held"][part] <= 0.51 * alone[part] for part in ("weights", "cache"))
        assert rank["same_with_gradients"]


def test_a_split_target_is_compiled_into_the_announced_graphs(folder):
    alone = read_alone(folder)["answers"]
    for rank in read_ranks(folder):
        seen = rank["compiled"]
        assert seen["compiled"]
        assert seen["late"] == 0
        assert seen["answers"] == {name: alone[name] for name in seen["answers"]}
        assert len(seen["answers"]) == 2


def test_processes_whose_clocks_differ_tune_the_same_tree(folder):
    first, second = (rank["tuned"] for rank in read_ranks(folder))
    assert first == second
    assert len(first[1]) > 3


def test_by_known_costs_two_processes_tune_the_tree_of_a_single_one(folder):
    alone = read_alone(folder)["tuned_by_table"]
    assert len(set(alone[1].values())) > 2
    assert [rank["tuned_by_table"] for rank in read_ranks(folder)] == [alone, alone]


def test_two_processes_capture_what_a_single_one_does(folder):
    alone, split = (folder / "capture" / f"by-{tensor}" for tensor in (1, 2))
    names = sorted(path.name for path in alone.glob("*.safetensors"))
    assert len(names) > 2
    for name in names:
        ours, theirs = load_file(split / name), load_file(alone / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, atol=1e-5, rtol=2**-7, msg=f"{name}: {key}")


def prepare(folder: Path, texts: list[str], *words: str) -> tuple[str, ...]:
    """Write the texts, and return the command that lets the target continue them."""
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    paths = (f"output_dir={folder / 'prepared'}", f"target.path={folder / 'target'}")
    return (
        "-m",
        "data.prepare",
        *ANSWERED.split(),
        *paths,
        f"mixture.sources.rows.path={folder / 'texts.jsonl'}",
        *words,
    )


def read_prepared(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("train-*.parquet")
    return pq.read_table(file).to_pylist()


@pytest.mark.slow
def test_two_processes_prepare_the_answers_of_a_single_one(folder):
    texts = [" ".join(map(str, range(i, i + 4 + i % 5))) for i in range(1, 21)]
    for tensor in (1, 2):
        run_python(*prepare(folder, texts, f"parallel.tensor={tensor}", f"run_name=by-{tensor}"), OMP_NUM_THREADS="1")
    alone, split = (read_prepared(folder / "prepared" / f"by-{tensor}") for tensor in (1, 2))
    assert alone == split
    assert len(alone) == 20
    again = run_python(*prepare(folder, texts, "parallel.tensor=2", "run_name=by-2"), OMP_NUM_THREADS="1")
    assert "already prepared" in again


@pytest.mark.slow
def test_a_full_disk_amid_answers_ends_all_processes_in_one_line_and_the_same_command_goes_on(folder):
    generator = random.Random(0)
    texts = [" ".join(str(generator.randint(1, 40)) for _ in range(8)) for _ in range(600)]
    command = prepare(folder, texts, "parallel.tensor=2", "answers.batch=32", "run_name=full")
    full = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert full.returncode == 2
    (line,) = full.stderr.splitlines()
    assert line.startswith("error: output_dir: must be a writable folder, got ")
    (journal,) = (folder / "prepared" / "full").glob("answers-*.jsonl")
    assert journal.stat().st_size == LARGEST_FILE
    run_python(*command, OMP_NUM_THREADS="1")
    assert len(read_prepared(folder / "prepared" / "full")) == len(set(texts))


def judge(folder: Path, *words: str) -> list[str]:
    """Return the arguments of `infer.eval`."""
    paths = (f"checkpoint={folder / COMPILED}", f"target.path={folder / 'target'}", f"output_dir={folder}")
    return [*paths, f"evaluation.prompts={folder / 'prompts.jsonl'}", *JUDGED.split(), *words]


def test_one_command_starts_the_processes_and_reports_what_a_single_one_does(folder):
    printed = {}
    for tensor in (1, 2):
        words = judge(folder, f"parallel.tensor={tensor}", f"run_name=by-{tensor}")
        printed[tensor] = run_python("-m", "infer.eval", *words, OMP_NUM_THREADS="1").splitlines()
    alone, split = (json.loads((folder / f"by-{tensor}" / "report.json").read_text()) for tensor in (1, 2))
    assert split["setup"]["target"] == alone["setup"]["target"] | {"processes": 2}
    for name, mode in alone["overall"]["modes"].items():
        ours = split["overall"]["modes"][name]
        assert ours["figures"]["acceptance_length"] == mode["figures"]["acceptance_length"]
        assert ours["verdict"]["lossless"] == "yes"
    assert sum(line.startswith("report: ") for line in printed[2]) == 1


def test_an_error_of_all_processes_is_one_line(folder):
    words = judge(folder, "parallel.tensor=2", "device.memory_gib=1e-6", "run_name=small")
    run = subprocess.run(
        [sys.executable, "-m", "infer.eval", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: device.memory_gib: must hold target, drafts and ")


@pytest.mark.parametrize("moment", ["early", pytest.param("late", marks=pytest.mark.slow)])
def test_processes_end_with_a_killed_launcher(folder, moment):
    words = judge(folder, "parallel.tensor=2", f"run_name={moment}")
    run = subprocess.Popen([sys.executable, "-m", "infer.eval", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    children: list[psutil.Process] = []

    def has_children() -> bool:
        children[:] = psutil.Process(run.pid).children()
        return len(children) == 2 and (moment == "early" or (folder / moment / "lock").exists())

    wait_for_moment(run, has_children)
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
    assert not alive
    assert not (folder / moment / "report.json").exists()


@pytest.mark.parametrize(
    ("words", "launched", "message"),
    [
        (["parallel.tensor=4"], "1", "parallel.tensor: must divide the target's 2 key-value heads, got 4; "),
        (["parallel.tensor=2", "device=xla"], "1", "parallel.tensor: must be 1 with device=xla, got 2; "),
        ([], "2", "parallel.tensor: must be the number of launched processes, 2, got 1; "),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_process_starts(
    folder, monkeypatch, read_refusal, words, launched, message
):
    monkeypatch.setenv("WORLD_SIZE", launched)
    assert read_refusal(main, *judge(folder, *words)).startswith(f"error: {message}")


def test_a_sweep_is_refused_whose_processes_would_each_run_all_of_it(folder, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [main.__module__, "-m", *judge(folder, "parallel.tensor=2", "tune=true,false")])
    with pytest.raises(SystemExit):
        main()
    assert "error: parallel.tensor: must be 1 in a sweep, got 2; " in capfd.readouterr().err
