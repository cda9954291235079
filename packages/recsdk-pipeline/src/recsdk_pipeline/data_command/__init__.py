"""`recsdk data`: files of training data."""
