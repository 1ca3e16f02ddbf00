"""Checkpoints that commit cb9f3c2 wrote, before files, names and rooms changed, load and decode alike.

`written_by_cb9f3c2` holds a draft of each method, trained for 60 steps on a text of the tiny target,
and the tokens that each round of that commit accepted.
"""

import json
from pathlib import Path

import pytest

from infer.engine.decode import Decoder
from models.drafts import load_draft
from models.speculate.sampling import SamplingConf
from tests.support.tiny import chain, tiny_target

OLD = Path(__file__).parent / "written_by_cb9f3c2"
DECODED = json.loads((OLD / "decoded.json").read_text())


@pytest.mark.parametrize("method", DECODED)
def test_a_checkpoint_of_cb9f3c2_drafts_as_it_did_there(method):
    recorded, target = DECODED[method], tiny_target(seed=0)
    _, draft = load_draft(OLD / method, target)
    verifier = draft.target_for(target) or target
    decoder = Decoder(verifier, draft.eval(), chain(4), sampling=SamplingConf(), slots=64)
    (answer,) = decoder.decode([recorded["prompt"]], row_ids=[0], max_new_tokens=24)
    assert answer.ids == recorded["ids"]
    assert answer.accepted == recorded["accepted"]
