"""transformers 4, by which NxD Inference reads drafts, reads the same values as our version.

Its configuration classes need no torch. A value that it does not find it replaces by its own
default in silence, so that nothing but a comparison shows a missing key.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from models.drafts.options import CausalLMConf, InitFrom
from models.drafts.registry import build_draft
from models.losses.config import LossConf
from models.targets.config import TargetConf
from models.targets.loading import load_target
from tests.support.commands.own_target import save_target
from tests.support.models.saved_configs import OLDER, SAVED, save_draft
from tests.support.models.tiny import CPU

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PYTHON = ROOT / ".venv-transformers4" / "bin" / "python"


def run_with_transformers4(script: str, *arguments: str | Path) -> Any:
    """Return what the script prints as JSON."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    process = subprocess.run(
        [PYTHON, HERE / script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


def test_transformers_4_reads_theta_and_scaling_of_every_checkpoint(tmp_path):
    folders = [save_draft(*case, tmp_path / " ".join(case)) for case in SAVED]
    configs = run_with_transformers4("read_configs.py", *folders)
    for (family, draft), config in zip(SAVED, configs, strict=True):
        expected = OLDER[family] | {"dtype": "bfloat16"}
        assert config == expected, f"{family}, {draft}"


@pytest.mark.parametrize("written_by", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_transformers_4_reads_the_tokenizer_of_a_draft_for_a_target_that_it_wrote(written_by, tmp_path):
    folder = save_target(tmp_path / "target", num_hidden_layers=2)
    config = folder / "tokenizer_config.json"
    written = {"tokenizer_class": written_by, "additional_special_tokens": ["<|im_start|>"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | written))
    target = load_target(TargetConf(path=str(folder)), CPU)
    conf = CausalLMConf(init_from=InitFrom.pruned, layers=[0, 1])
    build_draft(conf, target, loss=LossConf(), seed=0).save(tmp_path / "draft", target)
    text = "<|im_start|>user\nHello there<|im_end|>"
    ids = run_with_transformers4("read_tokenizers.py", text, folder, tmp_path / "draft")
    assert ids == [target.tokenizer(text)["input_ids"]] * 2
