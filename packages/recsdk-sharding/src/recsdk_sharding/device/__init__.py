"""Tables whose rows and optimizer state are tensors on a device (npu, cuda).

The host maps ids to row numbers and says which rows are added up in which order (`batch`); the
device reads, adds and updates rows with torch's operators (`kernels`, `optimizers`).
"""
