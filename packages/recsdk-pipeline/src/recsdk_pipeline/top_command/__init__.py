"""`recsdk top`: a running training in the terminal."""
