"""Capture a small feature store from a tiny target on disk and its documents."""

import json
import random
from pathlib import Path

from data.config import CaptureConf, DataConf, DataSource
from data.feature_capture import capture_features
from data.features.reader import FeatureStore
from models.device.config import DeviceConf, DeviceName, Precision
from models.drafts.base import Needs
from models.drafts.options import DraftConf, Eagle3Conf
from models.targets.config import TargetConf
from models.targets.target import Target
from tests.support.data.chat import save
from tests.support.models.tiny import LAYERS, VOCAB

COMMAND = "python -m data.capture run_name=small"
EAGLE3 = Needs(layers=LAYERS, hidden=False, context=True)
LENGTH = 32


def written(folder: Path, target: Target) -> Path:
    """Save a target as commands load it, and documents for it."""
    save(target, folder / "target")
    write_documents(folder / "documents.jsonl", seed=0)
    return folder


def write_documents(path: Path, *, seed: int, count: int = 40, longest: int = LENGTH) -> None:
    """Write documents, most of them with two answers; some end in a prompt."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            sizes = [draw.randint(2, longest // 5) for _ in range(draw.choice([2, 4, 5]))]
            answer = [flag for i, size in enumerate(sizes) for flag in [i % 2 == 1] * size]
            ids = [draw.randrange(1, VOCAB) for _ in answer]
            file.write(json.dumps({"ids": ids, "answer": answer}) + "\n")


def conf(folder: Path, *, draft: DraftConf | None = None, precision: str = "float32", **changes):
    """Configure a capture of a handful of shards."""
    settings = {"batch": 2, "shard_mb": 0.02, "run_name": "small"} | changes
    data = DataConf(
        source=DataSource.jsonl,
        path=str(folder / "documents.jsonl"),
        row_length=LENGTH,
        overlap=settings.pop("overlap", None),
        limit=settings.pop("limit", None),
    )
    return CaptureConf(
        target=TargetConf(name="tiny", path=str(folder / "target")),
        draft=draft or Eagle3Conf(layers=LAYERS, ttt_steps=2),
        data=data,
        device=DeviceConf(name=DeviceName.cpu, precision=Precision(precision), compile=False),
        output_dir=str(folder / "capture"),
        **settings,
    )


def captured(conf: CaptureConf) -> Path:
    return capture_features(conf, command=COMMAND)


def opened(path: Path, target: Target, needs: Needs = EAGLE3, **how) -> FeatureStore:
    return FeatureStore(
        path, target_hash=target.fingerprint, tokenizer_hash=target.tokenizer_fingerprint, needs=needs, **how
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
