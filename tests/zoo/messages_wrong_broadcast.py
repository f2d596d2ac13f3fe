"""Lab 00: broadcasts that go astray."""
