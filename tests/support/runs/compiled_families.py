"""Count the graphs of rounds over layers of several kinds; print the counts as JSON.

python -m tests.support.runs.compiled_families gemma3 gpt_oss
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from infer.engine.decode import Decoder
from models.device.device import Device
from models.trees.sampling_config import SamplingConf
from tests.support.models.family_models import WINDOW, family_target, partly_agreeing
from tests.support.models.tiny import CPU, VOCAB, static

NEW = 12


def decode(decoder: Decoder, lengths: list[int]) -> list[list[int]]:
    """Decode a text of each length, two texts at a time."""
    numbers = torch.Generator().manual_seed(5)
    texts = [torch.randint(1, VOCAB, (n,), generator=numbers).tolist() for n in lengths]
    answers = [
        decoder.decode(texts[i : i + 2], row_ids=[i, i + 1], max_new_tokens=NEW) for i in range(0, len(texts), 2)
    ]
    return [row.ids for rows in answers for row in rows]


def measure(family: str) -> dict[str, object]:
    regions: list[int] = []

    def backend(graph, inputs):
        """Compile nothing, and count the graphs of layers within a graph."""
        regions.append(sum(name.startswith("subgraph") for name, _ in graph.named_children()))
        return graph.forward

    answers, counts = [], []
    compiled: Any = {"compiles": True, "backend": backend}
    for device in (CPU, replace(CPU, **compiled)):
        target = family_target(family, device=device)
        draft = partly_agreeing(family, target)
        decoder = Decoder(target, draft, static(), sampling=SamplingConf(), slots=64, batch=2)
        counts.append(Device.count_graphs())
        answers.append(decode(decoder, [3, WINDOW + 9]))
        counts.append(Device.count_graphs())
        answers[-1] += decode(decoder, [9, 2, WINDOW, 30])
        counts.append(Device.count_graphs())
    return {
        "graphs": counts[-2] - counts[-3],
        "added": counts[-1] - counts[-2],
        "equal": answers[0] == answers[1],
        "layer_graphs": min(regions),  # of a round with a single pass; rounds of drafts have several
    }


def main(*families: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: measure(name) for name in families}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
