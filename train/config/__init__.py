"""The configuration of a training run: one file per group; none of them imports PyTorch."""
