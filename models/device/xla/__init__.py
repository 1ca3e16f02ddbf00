"""What only the PyTorch/XLA route needs; its processes are in train/distributed/xla.py."""
