"""The target of a run: of one with `measure=false`, which learns from a feature store, embeddings and head alone."""

import logging
from pathlib import Path

from data.features.manifest import read_manifest
from models.targets.loading import load_target_tables
from models.targets.target import Target
from train.config.run import TrainConf
from train.distributed.parallel import Parallel

log = logging.getLogger("train")


def build_run_target(conf: TrainConf, parallel: Parallel) -> Target:
    """Build the target of a run; raise UserError for a store of another one.

    Without its layers, the hash of all weights is the one that the store tells.
    """
    if conf.measure:
        return parallel.build_target(conf)
    folder = Path(str(conf.data.path))
    manifest = read_manifest(folder)
    target = load_target_tables(conf.target, parallel.device, fingerprint=manifest.target_sha256)
    manifest.check_tables(folder, target.tables_fingerprint)
    if target.name != manifest.target:
        line = "measure=false: the store is of %s; whether %s has the same layers is not checked"
        log.warning(line, manifest.target, target.name)
    return target
