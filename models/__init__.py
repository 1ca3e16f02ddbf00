"""Models: targets, drafts, token trees, losses, checkpoints and the devices they run on."""
