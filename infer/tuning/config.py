"""What `python -m infer.tune` takes."""

import re
import shlex
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from infer.config import DEMO_TOKENS, MOST_RANKS, OWN, listed_checkpoints
from models.device import DeviceConf
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import TreeConf
from models.target.target import TargetConf


@dataclass(kw_only=True)
class TuneConf:
    """For which batches and contexts, and which trees and windows are considered."""

    checkpoint: Any = None  # a directory, or a list of them; null = the newest finished run
    batch: list[int] = field(default_factory=lambda: [1, 4, 16])
    context: list[int] | None = None  # room for prompt and answer; null = as the prompts need
    depth: int = 10  # longest window, deepest node
    nodes: list[int] = field(default_factory=lambda: [4, 8, 16, 24, 32, 63])  # budgets of trees
    ranks: int = 10  # candidates measured at each depth
    copied: int = 8  # tokens of n-gram lookup that may hang beside each
    sweep: bool = False  # measure every window and a dozen trees too, to judge the choice by
    # as evaluation.prompts; null = those that chose the checkpoint, or some that the demo trains on
    prompts: str | None = None
    num_prompts: int = 32  # of the demo's
    max_new_tokens: int = DEMO_TOKENS
    repeats: int = 2  # times that every prompt is decoded in each mode, there and back
    tree: TreeConf = field(default_factory=TreeConf)  # one more to compare with
    sampling: SamplingConf = field(default_factory=SamplingConf)
    target: TargetConf = field(default_factory=lambda: TargetConf(name=OWN))
    device: DeviceConf = field(default_factory=DeviceConf)
    output_dir: str = "outputs/infer.tune"
    run_name: str = "tune"

    def __post_init__(self) -> None:
        self.checkpoint = listed_checkpoints(self.checkpoint)
        for key in ("depth", "ranks", "num_prompts", "repeats"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}: must be at least 1, got {getattr(self, key)}")
        if self.max_new_tokens < 2:
            raise UserError(f"max_new_tokens: must be at least 2, got {self.max_new_tokens}")
        if self.ranks > MOST_RANKS:
            raise UserError(f"ranks: must be at most {MOST_RANKS}, got {self.ranks}")
        if self.copied < 0:
            raise UserError(f"copied: must not be negative, got {self.copied}; 0 copies none")
        for key in ("batch", "nodes", "context"):
            given = getattr(self, key)
            if given is not None and (not given or min(given) < 1):
                raise UserError(f"{key}: must list numbers of at least 1, got {given}")
        most = sum(self.ranks**depth for depth in range(1, self.depth + 1))
        if min(self.nodes) > most:
            raise UserError(
                f"nodes: must list one of at most the {most} paths that depth and ranks give, "
                f"got {self.nodes}; raise depth or ranks"
            )

    def carried(self, batch: int) -> str:
        """What `infer.eval` is told beside checkpoint and tree, to decode as was tuned for."""
        asked = {
            "target": (self.target, TargetConf(name=OWN)),
            "device": (self.device, DeviceConf()),
            "evaluation.sampling": (self.sampling, SamplingConf()),
        }
        said = {
            f"{key}.{one.name}": getattr(ours, one.name)
            for key, (ours, default) in asked.items()
            for one in fields(ours)
            if getattr(ours, one.name) != getattr(default, one.name)
        }
        if self.prompts is not None:
            said["evaluation.prompts"] = self.prompts
        if self.max_new_tokens != DEMO_TOKENS:
            said["evaluation.max_new_tokens"] = self.max_new_tokens
        if batch > 1:
            said["evaluation.batches"] = f"[{batch}]"
        return overrides(said)


def overrides(said: dict[str, Any]) -> str:
    r"""As words of a shell.

    >>> overrides({"tree.width": None, "device.compile": False, "prompts": "my file.jsonl"})
    'tree.width=null device.compile=false \'prompts="my file.jsonl"\''
    """
    return " ".join(shlex.quote(f"{key}={_spelled(value)}") for key, value in said.items())


def _spelled(value: Any) -> str:
    """As Hydra reads it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value.value if isinstance(value, Enum) else value)
    plain = re.fullmatch(r"[\w./+-]+|\[\d+\]", text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return text if plain else f'"{escaped}"'
