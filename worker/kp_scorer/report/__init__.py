"""What an analysis looks like: as a page, and as text."""
