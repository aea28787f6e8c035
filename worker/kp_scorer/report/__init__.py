"""The figures of one or many decisions, shown on a page, in a terminal and in words."""
