"""What limits and types of rows cost a model."""
