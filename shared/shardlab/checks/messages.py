"""Lab 00: checks of messages and collectives from messages."""
