"""A new method is a class of options, a file of modules and a YAML, and nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.models.tiny import sampled_texts

ROOT = Path(__file__).parents[2]
OPTIONS = """

@dataclass(kw_only=True)
class BigramConf(DraftConf):
    method: ClassVar[str] = "bigram"
    architecture: ClassVar[str] = "BigramModel"
    draft_class: ClassVar[str] = "models.drafts.bigram:BigramDraft"
    max_depth: int = 8

    @property
    def needs_context(self) -> bool:
        return False


METHODS["bigram"] = BigramConf
"""
METHOD = '''
"""Bigrams: what follows a token, whatever came before it."""

import torch
from torch import nn

from models.drafts.base import Needs
from models.drafts.bases.feature import FeatureDraft
from models.drafts.options import BigramConf
from models.losses.loss_weights import shift_left
from models.trees.growth import grow


class BigramDraft(FeatureDraft):
    conf_class = BigramConf
    config_keys = {"max_depth": "depth"}

    def __init__(self, conf, config, target):
        super().__init__(conf, config, target)
        self.needs = Needs(layers=[], hidden=False, context=False)
        self.guess = nn.Embedding(config.vocab_size, config.hidden_size)

    def loss_terms(self, batch, target_output):
        guessed = self.guess(shift_left(batch.input_ids, 1))
        return self.distill([guessed], batch, target_output, heads=[self.head.weight])

    def new_state(self, batch, slots):
        return {"token": torch.zeros(batch, dtype=torch.int64, device=self.guess.weight.device)}

    def advance(self, state, emitted):
        last = emitted.ids.gather(1, (emitted.count - 1).clamp_min(0)[:, None])[:, 0]
        return {"token": torch.where(emitted.count > 0, last, state["token"])}

    def propose(self, state, *, tree, sampler):
        def logits(tokens):
            return self.head(self.guess(tokens))

        return grow(tree, sampler, logits(state["token"]), lambda tokens, *_: logits(tokens))
'''
ENTRY = """
bigram:
  method: bigram
  max_depth: 5
  recipe:
    target: demo
"""


def test_a_method_of_options_modules_and_an_entry_is_trained_reported_and_evaluated(target, tmp_path):
    copy = tmp_path / "checkout"
    for package in ("conf", "data", "infer", "models", "train"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "models" / "drafts" / "options.py").open("a") as options:
        options.write(OPTIONS)
    (copy / "models" / "drafts" / "bigram.py").write_text(METHOD)
    with (copy / "conf" / "drafts.yaml").open("a") as drafts:
        drafts.write(ENTRY)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    texts = sampled_texts(target, count=8, length=32)
    rows = [{"ids": ids, "answer": [t >= 4 for t in range(32)]} for ids in texts]
    prompts = [
        {"id": str(i), "category": "abc"[i % 3], "text": " ".join(map(str, ids[:4]))} for i, ids in enumerate(texts[:3])
    ]
    for name, lines in (("rows", rows), ("prompts", prompts)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    common = [
        f"target.path={tmp_path}/target",
        *"device=cpu device.compile=false tree=dynamic device.threads=1".split(),
        f"evaluation.prompts={tmp_path}/prompts.jsonl",
        "evaluation.max_new_tokens=24",
        "evaluation.batch_sizes=[]",
    ]
    run_module(
        copy,
        "train",
        "draft=bigram",
        "data=jsonl",
        f"data.path={tmp_path}/rows.jsonl",
        *(
            "data.row_length=32 optim.steps=150 optim.rows_per_step=4 optim.lr=3e-2 optim.compile_loss=false "
            "interval.eval=150 held_out.selection=2 run_name=new"
        ).split(),
        *common,
    )
    out = run_module(copy, "infer.eval", "checkpoint=outputs/train/new/checkpoint", *common)
    assert "new, tree: " in out
    for folder in ("train/new", "infer.eval/eval"):
        report = json.loads((copy / "outputs" / folder / "report.json").read_text())
        assert report["drafts"][0]["method"] == "bigram"
        modes = report["overall"]["modes"]
        assert all(mode["verdict"]["lossless"] == "yes" for mode in modes.values())
        tree, untrained = (
            modes[f"new/{name}"]["figures"]["acceptance_length"]["mean"] for name in ("tree", "untrained")
        )
        assert tree > 1.2 * untrained


def run_module(folder: Path, module: str, *overrides: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", module, *overrides],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:]
    return process.stdout
