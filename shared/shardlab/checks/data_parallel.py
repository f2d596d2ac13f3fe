"""Lab 02: checks of DataParallel in one process."""
