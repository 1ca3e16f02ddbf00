"""Models: targets, drafts, token trees, losses, checkpoints and the devices they run on."""

import models.device  # noqa: F401  must precede torch, as it limits what torch autoloads
