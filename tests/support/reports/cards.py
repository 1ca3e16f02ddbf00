"""Read a model card as a reader and the hub do."""

import json
import re
import shlex
from pathlib import Path

from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt


def read_card(checkpoint: Path) -> ModelCard:
    """Read a checkpoint's card by the hub's rules: names of its own, a license, tables that render.

    `ModelCard.validate` asks the hub itself, which a test cannot reach.
    """
    card = ModelCard.load(checkpoint / "README.md")
    for name in [card.data.base_model, *(card.data.datasets or [])]:
        if name is not None:
            validate_repo_id(name)
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.license == "other"
    assert re.fullmatch(r"[a-z0-9-.]+", card.data.license_name)  # which "other" needs
    tokens = MarkdownIt("commonmark").enable("table").parse(card.text)
    assert len([token for token in tokens if token.type == "table_open"]) == 2
    assert [t.content for t in tokens if t.type == "inline" and t.content.startswith("|")] == []
    return card


def read_serve_line(card: ModelCard) -> tuple[str, dict]:
    """Return the model that `vllm serve` loads, and its speculative config."""
    command = next(line for line in card.text.splitlines() if line.startswith("    vllm serve"))
    _, _, target, _, config = shlex.split(command)
    return target, json.loads(config)
