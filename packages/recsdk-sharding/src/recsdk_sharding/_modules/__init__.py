"""The collections of hash tables, unsharded and sharded, and their sharders."""
