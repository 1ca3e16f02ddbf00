"""The PyTorch/XLA route; its processes are in train/distributed/xla.py."""
