"""Configuration files to start from."""
