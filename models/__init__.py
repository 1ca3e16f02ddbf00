"""What learns and what drafts: targets, drafts, trees, losses, checkpoints, and where they live."""

import models.device  # noqa: F401  before anything imports torch: it decides what torch may load
