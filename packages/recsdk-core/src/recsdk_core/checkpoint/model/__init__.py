"""The tables of one model, which are saved and loaded together, on one process or on many."""
