"""Stages of `train.device` whose checks crash and hang."""
