"""The checks of `python -m train.device`: what training and decoding need of a device, in seven stages."""
