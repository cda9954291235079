"""What a hash table is: its config, and how new rows get their values."""
