"""Lab 03: wrong solutions."""
