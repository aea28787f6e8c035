"""The figures of decisions, of one or of many, and how they look on a page, in a terminal and in words."""
