"""Lab 00: wrong solutions."""
