"""Run an evaluation or its warm-up; print how often the compiler's cache had the graph.

TORCHINDUCTOR_CACHE_DIR=DIR python -m tests.support.runs.warmup_run warm|judge FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from infer.config import EvaluationConf
from infer.measure.eval_modes import DraftUnderTest
from infer.measure.evaluate import compile_eval_graphs, evaluate_drafts
from models.trees.config import TreeConf
from models.trees.tree import TreeKind
from tests.support.models.tiny import CPU, new_draft, tiny_target
from tests.support.runs.graphs_run import write_prompt_file

CHAIN = TreeConf(kind=TreeKind.chain, depth=2)


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    target = tiny_target(seed=0, device=replace(CPU, compiles=True))
    conf = EvaluationConf(prompts=str(write_prompt_file(Path(folder))), max_new_tokens=4, batch_sizes=[])
    draft = new_draft(target)
    tested = DraftUnderTest(name="trained", draft=draft, untrained=draft)
    run = {"warm": compile_eval_graphs, "judge": evaluate_drafts}[what]
    run(target, [tested], tree=CHAIN, conf=conf)
    lookups = counters["inductor"]
    counts = {name: lookups[f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    print(json.dumps(counts | {"graphs": counters["stats"]["unique_graphs"]}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
