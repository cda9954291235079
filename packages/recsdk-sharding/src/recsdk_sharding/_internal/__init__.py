"""Parts that other packages do not import."""
