"""Devices: where tensors live, how functions are compiled.

A new kind of device gets a name (config.py), a rule that chooses it (opening.py), a Device or
a subclass of it (device.py), and a YAML in conf/device/.
"""
