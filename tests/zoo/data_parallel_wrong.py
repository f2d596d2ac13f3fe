"""Lab 02: wrong solutions."""
