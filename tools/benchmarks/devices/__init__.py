"""Steps of tables on devices."""
