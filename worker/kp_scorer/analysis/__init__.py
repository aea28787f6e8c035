"""What decisions say, one or many of them: pure functions of decisions and traces. No I/O, no clock, no settings."""
