"""Models: targets, drafts, token trees, losses, checkpoints and the devices they run on."""

import models.device  # noqa: F401  limits what torch autoloads, before anything imports torch
