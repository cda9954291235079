"""What the tests of this package share."""
