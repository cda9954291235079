"""Saving, loading and moving rows between models."""
