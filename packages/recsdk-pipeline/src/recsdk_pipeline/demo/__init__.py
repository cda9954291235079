"""`recsdk demo`: a DLRM trained on raw 64-bit ids over several ranks."""
