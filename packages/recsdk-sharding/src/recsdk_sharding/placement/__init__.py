"""Who has which rows and columns of a table."""
