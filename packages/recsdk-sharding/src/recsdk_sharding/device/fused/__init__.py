"""Kernels written in Triton, for device type cuda; what imports them imports triton.

They take and give what torch's operators of `recsdk_sharding.device.kernels` and `.optimizers` do,
in fewer launches. Each is bit for bit repeatable: floats are added in an order that depends on the
data alone, and what is added atomically are whole numbers. Nothing is read back by the host.
"""
