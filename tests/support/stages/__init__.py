"""Stages of `train.device` whose checks crash and hang, and a device with faults for its own stages."""
