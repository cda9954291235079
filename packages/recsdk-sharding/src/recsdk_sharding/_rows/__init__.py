"""The rows of a table on one process, their optimizers, and how they enter a `state_dict`."""
