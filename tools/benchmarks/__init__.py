"""Behind `make bench-NAME`: one module a name, each with `run(quick) -> list[Record]`."""
