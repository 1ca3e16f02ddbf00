"""Checkpoints of commit cb9f3c2, before files and names changed, load and decode as they did there.

`written_by_cb9f3c2` holds a tiny target, a draft of each method that was trained on a text of it
for 60 steps, and the tokens that each round accepted. The target is stored too, because its random
weights would differ in their last bits between vector widths. README.md there has the script.
"""

import json
from pathlib import Path

import pytest

from infer.engine.decode import Decoder
from models.drafts.base import SpeculativePair
from models.drafts.registry import load_draft
from models.speculate.config import SamplingConf
from models.target.config import TargetConf
from models.target.target import load_target
from tests.support.tiny import CPU, chain

OLD = Path(__file__).parent / "written_by_cb9f3c2"
DECODED = json.loads((OLD / "decoded.json").read_text())


@pytest.mark.parametrize("method", DECODED)
def test_a_checkpoint_of_cb9f3c2_drafts_as_it_did_there(method):
    recorded, target = DECODED[method], load_target(TargetConf(path=str(OLD / "target")), CPU)
    _, draft = load_draft(OLD / method, target)
    verifier = SpeculativePair(target=target, draft=draft).verifying_target
    decoder = Decoder(verifier, draft.eval(), chain(4), sampling=SamplingConf(), slots=64)
    (answer,) = decoder.decode([recorded["prompt"]], row_ids=[0], max_new_tokens=24)
    assert answer.ids == recorded["ids"]
    assert answer.accepted == recorded["accepted"]
