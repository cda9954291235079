"""The way of a batch: from ids to mapped bags, to vectors, and back."""
