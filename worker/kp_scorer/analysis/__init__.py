"""What a set of decisions says: pure functions of decisions. No I/O, no clock, no settings."""
